"""One learner in a process of its own: ``python -m benchmarks.training.learn NAME PROJECT EPOCHS``.

A line of input with CPU seconds makes it train for so long and then measure itself; it
answers with a line of JSON. Measuring, and what compiles at the first step, are not counted as training.
"""

from __future__ import annotations

import json
import sys
import time
from importlib import import_module
from pathlib import Path

from benchmarks.training.child import PEERS
from benchmarks.training.learner import Lesson, acceptance_length

MODULES = {"eyas": "learn_ours", "SpecForge": "learn_specforge", "speculators": "learn_speculators"}


def main() -> None:
    name, folder, epochs = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    answers, sys.stdout = sys.stdout, sys.stderr
    if name != "eyas":
        sys.path.append(str(PEERS))
    kind = import_module(f"benchmarks.training.{MODULES[name]}").Learner
    lesson = Lesson.of(folder, epochs)
    started = time.process_time()
    learner = kind(lesson)
    spent = time.process_time() - started  # the fitted start is part of a recipe
    if name != "eyas":
        kind(lesson).learn()  # compiles, in a learner that is thrown away
    tokens, ended = 0, False
    print(json.dumps({"cpu": spent}), file=answers, flush=True)
    for line in sys.stdin:
        until = spent + float(line)
        while spent < until and not ended:
            started = time.process_time()
            learned = learner.learn()
            spent += time.process_time() - started
            tokens, ended = tokens + learned, learned == 0
        answer = {
            "cpu": spent,
            "tokens": tokens,
            "ended": ended,
            "length": acceptance_length(lesson, learner.shape, learner.weights()),
        }
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
