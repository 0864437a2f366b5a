"""The command line: finds the verb, turns errors into messages and exit codes."""

from __future__ import annotations

import inspect
import itertools
import sys
import traceback
from importlib import import_module
from pathlib import Path

from cyclopts import App, CycloptsError, Group, Parameter

from eyas import __version__
from eyas.base.clock import utc_now_text
from eyas.base.ending import owned
from eyas.base.errors import EyasError, Stopped, UsageError
from eyas.base.files import write_atomic
from eyas.base.layout import CONFIG_NAME
from eyas.cli.hints import at_project
from eyas.cli.output import print_error
from eyas.cli.words import value_of, wanted_host

EVERYDAY = Group.create_ordered("Everyday")
STAGE = Group.create_ordered("Stages (run does them all, in this order)")
EXPERT = Group.create_ordered("Expert")

_VERBS = {
    "init": ("init:init", "Make a project folder from a target and chat data.", EVERYDAY),
    "run": ("run:run_all", "Do everything that is left; resumes after any stop or crash.", EVERYDAY),
    "status": ("status:status", "Where every stage stands and what comes next.", EVERYDAY),
    "stop": ("stop:stop", "Ask the running eyas to save its state and end.", EVERYDAY),
    "logs": ("logs:logs", "Events of an attempt; --follow goes on as they come.", EVERYDAY),
    "doctor": ("doctor:doctor", "What survived, what is damaged, what to do; changes nothing.", EVERYDAY),
    "recover": ("recover:recover", "Mend what doctor finds and bring the run back, step by step.", EVERYDAY),
    "todo": ("todo:todo", "What is to be done and was done, with evidence and history.", EVERYDAY),
    "report": ("report:report", "Write data, runs, training and results into one file.", EVERYDAY),
    "dashboard": ("dashboard:dashboard", "Show the project as a live page in a browser.", EVERYDAY),
    "prepare": ("stage:prepare", "Read, render, split and count the data.", STAGE),
    "regenerate": ("stage:regenerate", "Let the target answer every prompt itself.", STAGE),
    "extract": ("stage:extract", "Capture hidden states into the store.", STAGE),
    "train": ("stage:train", "Train the drafter from the store.", STAGE),
    "evaluate": ("stage:evaluate", "Measure acceptance length and speed on held-out prompts.", STAGE),
    "export": ("stage:export", "Write the checkpoint that engines load.", STAGE),
    "notify": ("notify:notify", "Send a message when a run stalls, stops, finishes or is damaged.", EXPERT),
    "verify": ("verify:verify", "Find damage: every file against what was written.", EXPERT),
    "push": ("push:push", "Put the project and this eyas on a host of eyas.toml.", EXPERT),
    "mcp": ("mcp:mcp", "Serve status, doctor, todo, plan and recover to an agent (MCP, stdio).", EXPERT),
    "bench": ("bench:bench", "Measure a running server: speed and acceptance, with and without.", EXPERT),
    "inspect": ("inspect:inspect", "Say what an export or checkpoint is and what is wrong with it.", EXPERT),
}

_GROUPS = {
    "store": (
        "Look after the store: list, mend, merge, clear away.",
        {
            "ls": ("store:ls", "List segments and when each was last hashed."),
            "repair": (
                "store:repair",
                "Set damaged segments aside, adopt whole ones, mend the ledger.",
            ),
            "compact": ("store:compact", "Merge small segments into large ones."),
            "gc": ("store:gc", "Remove what is provably held elsewhere or was never finished."),
            "import": ("exchange:import_", "Take in states that another tool captured."),
            "export": ("exchange:export", "Write stored samples in a layout of other tools."),
        },
    ),
    "serve": (
        "Servers of the target: start, stop, look at, and patch their engine.",
        {
            "start": ("serve:start", "Start servers, prove them, and leave them running."),
            "stop": ("serve:stop", "Stop servers, and prove that nothing of them is left."),
            "status": ("serve:status", "Which servers run, in which mode, and how they are."),
            "logs": ("serve:logs", "The last lines of a server's output."),
            "fake": ("serve_fake:fake", "A server of a small model with faults on order, for rehearsals."),
            "patch status": ("patch:status", "Where each declared edit of the engine's source stands."),
            "patch apply": ("patch:apply", "Apply declared edits; the originals are kept."),
            "patch restore": ("patch:restore", "Put the originals back."),
        },
    ),
    "config": (
        "Show the configuration and what follows from it.",
        {"show": ("config:show", "Every value in force, with its reason.")},
    ),
}

_DEEPER = {"patch": "Edits of the engine's source: applied, verified by hash, restored."}
"""What stands beside a word that has verbs of its own within a group."""

VERB_NAMES = (*_VERBS, *(f"{group} {name}" for group, (_, verbs) in _GROUPS.items() for name in verbs))
"""Everything that can be called, as it is typed."""

PROJECT_VERBS = tuple(verb for verb in VERB_NAMES if verb not in ("init", "inspect", "serve fake"))
"""Those that are about a project."""


def build_app(explained: str = "") -> App:
    """The tree of verbs; each module is imported only when its verb is called.

    Args:
        explained: the verb whose own text stands in its help, not the line that stands for it in lists.
    """
    app = App(
        name="eyas",
        help="Train EAGLE-3 draft models; kill it anywhere, lose nothing.",
        version=__version__,
        help_format="plaintext",
        default_parameter=Parameter(negative=(), show_default=_shown_default),
        result_action="return_value",
    )
    for order, (name, (place, summary, group)) in enumerate(_VERBS.items()):
        text = _own_text(place) if name == explained else summary
        app.command(f"eyas.cli.verbs.{place}", name=name, help=text, group=group, sort_key=order)
    for group_name, (summary, verbs) in _GROUPS.items():
        inner = App(name=group_name, help=summary, group=EXPERT)
        deeper: dict[str, App] = {}
        for order, (name, (place, line)) in enumerate(verbs.items()):
            text = _own_text(place) if f"{group_name} {name}" == explained else line
            first, _, second = name.partition(" ")
            parent = inner
            if second:
                if first not in deeper:
                    deeper[first] = App(name=first, help=_DEEPER[first], sort_key=order)
                    inner.command(deeper[first])
                parent = deeper[first]
            parent.command(f"eyas.cli.verbs.{place}", name=second or first, help=text, sort_key=order)
        app.command(inner)
    return app


def _own_text(place: str) -> str:
    """What a verb says of itself, without its options; a paragraph is one line, for any width."""
    module, _, name = place.partition(":")
    text = inspect.getdoc(getattr(import_module(f"eyas.cli.verbs.{module}"), name)) or ""
    paragraphs = text.partition("\nArgs:")[0].strip().split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def _shown_default(value: object) -> str | None:
    """A default as the help shows it; an option that is off, or takes nothing, needs no word about it."""
    return None if value is None or value is False or value in ((), "") else str(value)


def command() -> None:
    """The `eyas` command: a process of its own."""
    with owned():
        main()


def main(arguments: list[str] | None = None) -> None:
    """Run one verb and leave with its exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    as_json = "--json" in words
    try:
        name = wanted_host(words)
        if name is not None and (done := _elsewhere(words, name)) is not None:
            sys.exit(done)
        asked = _verb(words).strip() if {"--help", "-h"} & set(words) else ""
        code = build_app(asked)(words, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        usage = UsageError(" ".join(str(error).split()), hint=f"eyas {_verb(words)}--help")
        print_error(usage, as_json)
        sys.exit(usage.exit_code)
    except EyasError as error:
        print_error(_at_project(error, words), as_json)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        stopped = Stopped(2)
        print_error(_at_project(stopped, words), as_json)
        sys.exit(stopped.exit_code)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)
    except Exception as error:
        print_error(_unexpected(error, words), as_json)
        sys.exit(1)
    sys.exit(code if isinstance(code, int) else 0)


def _at_project(error: EyasError, words: list[str]) -> EyasError:
    if error.hint:
        error.hint = at_project(error.hint, value_of(words, "--project"), PROJECT_VERBS)
    return error


def _elsewhere(words: list[str], host: str) -> int | None:
    from eyas.cli.remote import forward  # configuration and hosts are loaded only for this

    return forward(words, host)


def _verb(words: list[str]) -> str:
    if words and words[0] in _VERBS:
        return f"{words[0]} "
    for length in (3, 2):
        if len(words) >= length and words[0] in _GROUPS:
            verb = " ".join(words[1:length])
            if verb in _GROUPS[words[0]][1]:
                return f"{words[0]} {verb} "
    return ""


def _unexpected(error: Exception, words: list[str]) -> EyasError:
    """Save the traceback where the logs are (or beside), and say so."""
    root = Path.cwd()
    for option, value in itertools.pairwise(words):
        if option == "--project":
            root = Path(value)
    stamp = utc_now_text().replace(":", "").split(".")[0]
    folder = root / "logs" if (root / CONFIG_NAME).exists() else root
    path = folder / f"eyas-traceback-{stamp}.txt"
    why = f"{type(error).__name__}: {error}"
    try:
        write_atomic(path, traceback.format_exc())
    except OSError:
        traceback.print_exc()
        return EyasError("unexpected error", why=why)
    return EyasError("unexpected error", where=path, why=why, hint="the traceback is saved; eyas run resumes")
