"""What may stand in ``eyas.toml``; every field is documented here and nowhere else."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from eyas.base.units import parse_bytes

Dtype = Literal["float64", "float32", "bfloat16", "float16"]
Fraction = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0)]


class Section(BaseModel):
    """A table of ``eyas.toml``: immutable, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class TargetConfig(Section):
    """The big model whose states are captured and whose tokens are drafted."""

    model: str
    """Folder of the target (config.json, tokenizer, safetensors)."""
    kind: Literal["local", "vllm", "sglang"] = "local"
    """Where tokens and states come from: transformers in this process, or servers of an engine."""
    device: str = "auto"
    """``auto`` (cuda when there is one), ``cpu``, ``cuda`` or ``cuda:1``."""
    dtype: Literal["auto"] | Dtype = "auto"
    """Arithmetic of the target; ``auto`` is bfloat16 where the device multiplies it natively, and for servers
    what the model's configuration says."""
    trust_remote_code: bool = False
    """Run Python code that the model folder brings along (some tokenizers need it)."""


class SourceConfig(Section):
    """One file of conversations or samples."""

    path: str
    """File (``.jsonl`` or ``.jsonl.gz``), relative to the project folder unless absolute."""
    name: str = ""
    """Name in statistics; the file's stem when empty."""
    limit: Positive | None = None
    """Take at most this many records, chosen by seed, not from the top."""
    share: Annotated[float, Field(gt=0, le=1)] | None = None
    """Take at most this share of the whole mixture, counted in records."""
    domain: str | None = None
    """Domain of every record that does not name its own."""


class DataConfig(Section):
    """Conversations in, samples out."""

    sources: tuple[SourceConfig, ...] = Field(min_length=1)
    """Files to read; duplicates across them fall out."""
    max_seq_len: Positive = 4096
    """Longest sample in tokens."""
    too_long: Literal["truncate", "drop"] = "truncate"
    """What happens to a longer one; one whose prompt alone is too long is always dropped."""
    validation: Fraction = 0.05
    """Share of conversations kept from training to measure it."""
    on_unreadable: Literal["fail", "skip"] = "fail"
    """A record that cannot be read ends the stage by name, or is counted and left out."""
    seed: int = 0
    """Decides limits, shares and the validation split."""


class RegenerateConfig(Section):
    """The target's own answers, which are what a drafter has to predict."""

    enabled: bool = True
    """Answer every prompt anew; off: train on the answers as given."""
    max_new_tokens: Positive = 1024
    """Longest answer in tokens."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """0 is greedy; give the temperature that will be served."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling."""
    seed: int = 0
    """Each answer draws from a stream of its own, made of this and the prompt."""
    batch_size: Positive = 64
    """Prompts answered together; of servers, the answers that each has in hand."""
    truncated: Literal["keep", "drop"] = "keep"
    """What becomes of an answer that hit ``max_new_tokens``: kept without an end token, or dropped."""


class ExtractConfig(Section):
    """Capturing states."""

    aux_layers: Literal["auto"] | tuple[Annotated[int, Field(ge=0)], ...] = "auto"
    """Layers whose residual stream is captured, counted as "after k layers"; auto: 2, n//2, n-3."""
    batch_tokens: Positive = 4096
    """Tokens in one forward pass, padding included."""
    recheck: Annotated[int, Field(ge=0)] = 3
    """Stored samples that are captured again and compared before a resumed extraction goes on."""
    retry_seconds: Annotated[float, Field(ge=0)] = 5.0
    """Wait before a sample that failed is tried again; doubled for the try after that, at most 5 minutes."""


class StoreConfig(Section):
    """Segments on disk."""

    dtype: Dtype = "bfloat16"
    """How states are kept."""
    segment_mib: Annotated[int, Field(ge=1, le=1024)] = 64
    """A segment closes at this size, in MiB."""
    segment_seconds: Annotated[float, Field(gt=0)] = 5.0
    """... or this long after its first sample."""


def _size(text: str) -> str:
    parse_bytes(text)
    return text


Size = Annotated[str, AfterValidator(_size)]
"""Bytes as people write them: ``200GB``, ``1.5TB``, ``64MiB``."""


class DiskConfig(Section):
    """How much room the project may take, and what happens when there is none."""

    budget: Size | None = None
    """Largest size of the project folder; none: as much as the filesystem has."""
    reserve: Size = "1GB"
    """Free space that is always left on the filesystem (hard limit)."""
    warn: Size = "5GB"
    """Free space below which a warning is said (soft limit)."""
    when_full: Literal["wait", "stop"] = "wait"
    """``wait`` pauses and goes on by itself when there is room; ``stop`` ends with exit code 12."""
    look_again_seconds: Annotated[float, Field(gt=0)] = 30.0
    """How often a paused run looks for room."""


class ExpectConfig(Section):
    """What the data will be, for a forecast before it is prepared; real counts replace it."""

    samples: Positive
    """Samples."""
    tokens: Positive
    """Tokens of all samples."""
    supervised_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of the tokens that the assistant wrote."""


class DrafterConfig(Section):
    """The architecture that is trained; sizes left at 0 are taken from the target."""

    norms: Literal["eagle3", "eagle3.1"] = "eagle3"
    """``eagle3.1`` norms each aux chunk and feeds the normed state to the next step."""
    vocab_size: Annotated[int, Field(ge=0)] = 0
    """Draft vocabulary; 0: 32,000, or the tokens that were seen if these are fewer."""
    intermediate_size: Annotated[int, Field(ge=0)] = 0
    """Width of the MLP; 0: the target's dense width."""
    num_heads: Annotated[int, Field(ge=0)] = 0
    """Attention heads; 0: the target's."""
    num_kv_heads: Annotated[int, Field(ge=0)] = 0
    """Key-value heads; 0: the target's."""
    head_dim: Annotated[int, Field(ge=0)] = 0
    """Width of a head; 0: the target's, or hidden size / heads."""


class TrainConfig(Section):
    """Optimisation; the defaults follow the measurements in docs/results.md."""

    epochs: Annotated[float, Field(gt=0)] = 6.0
    """Passes over the training samples."""
    batch_tokens: Positive = 2048
    """Tokens packed into one forward pass; a longer sample gets a pass of its own."""
    accumulate: Positive = 1
    """Forward passes per optimizer step."""
    lr: Annotated[float, Field(gt=0)] = 1e-3
    """Highest learning rate."""
    warmup: Fraction = 0.03
    """Share of the steps in which the rate rises."""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """After the warm-up: ``cosine`` falls to the end, ``wsd`` stays and falls in the last ``decay``."""
    decay: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Share of the steps in which ``wsd`` falls."""
    min_lr_ratio: Fraction = 0.05
    """Where the schedule ends, as a share of ``lr``."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW's decay, on matrices only."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """AdamW's averages."""
    clip: Annotated[float, Field(gt=0)] = 1.0
    """Largest gradient norm."""
    steps: Annotated[int, Field(ge=1, le=16)] = 7
    """Draft steps unrolled in training (J)."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Weight of step j is gamma^j."""
    loss: Literal["soft_ce", "kl", "lk", "mixed"] = "soft_ce"
    """``lk`` maximises the accepted mass directly; ``mixed`` is soft_ce + lk."""
    warm_start: Literal["head", "head+ridge", "head+ridge+layer"] = "head+ridge+layer"
    """From the target: head rows and norm; ``ridge`` fits ``fc``, ``layer`` the layer's matrices too."""
    start_from: str | None = None
    """Folder of a trained drafter (ours or a published one) to go on from: its shape and draft vocabulary
    are kept, and there is no warm start."""
    dtype: Literal["auto"] | Dtype = "auto"
    """Arithmetic of training (master weights are float32 or wider)."""
    seed: int = 0
    """Decides order and initial weights."""
    checkpoint_minutes: Annotated[float, Field(gt=0)] = 10.0
    """Time between checkpoints."""
    keep_checkpoints: Annotated[int, Field(ge=1)] = 2
    """Newest checkpoints kept, beside the best."""
    validations: Annotated[int, Field(ge=1)] = 6
    """Validations over the run; the last is at its end."""
    max_bad_steps: Annotated[int, Field(ge=1)] = 20
    """Steps in a row without a finite loss or gradient before the run stops."""

    @model_validator(mode="after")
    def _one_start(self) -> TrainConfig:
        if self.start_from is not None and "warm_start" in self.model_fields_set:
            raise ValueError("start_from and warm_start are two ways to begin; keep one of them")
        return self


class EvaluateConfig(Section):
    """Speculative decoding with the local target on held-out prompts."""

    prompts: str | None = None
    """File of held-out prompts; none: the validation conversations."""
    limit: Positive | None = None
    """Use at most this many prompts."""
    num_drafts: Annotated[int, Field(ge=1, le=16)] = 3
    """Tokens drafted per round (K of a chain)."""
    max_new_tokens: Positive = 256
    """Longest answer in tokens."""
    batch_size: Positive = 16
    """Prompts decoded together when acceptance is measured."""
    timing_prompts: Annotated[int, Field(ge=0)] = 8
    """Prompts decoded one at a time, with and without the drafter, to measure speed."""


class ExportConfig(Section):
    """Checkpoints that engines load."""

    name: str = "eagle3"
    """Folder below ``exports/``."""
    min_acceptance_length: Annotated[float, Field(ge=0)] = 0.0
    """Refuse to export below this (exit code 15); 0 is no gate."""


class WayConfig(Section):
    """One way to reach a host; the first that answers is taken."""

    ssh: str | None = None
    """Destination as OpenSSH knows it (its own configuration counts); none: this machine."""
    inside: tuple[str, ...] = ()
    """Words put before every command there, for example ``["pct", "exec", "129", "--"]``."""


class HostConfig(Section):
    """A machine on which commands are run."""

    name: str
    """What ``--host`` calls it."""
    ways: tuple[WayConfig, ...] = Field(min_length=1)
    """Ways to reach it, in the order in which they are tried."""
    project: str | None = None
    """Where the project lies there (absolute)."""
    python: str = "python3"
    """Python there that has what eyas imports."""
    connect_seconds: Annotated[float, Field(gt=0)] = 10.0
    """Patience with a connection before the next way is tried."""


class NeededFileConfig(Section):
    """A file outside the project that the run needs, and where it comes from."""

    path: str
    """Where it has to be."""
    source: str
    """A copy that outlives a reboot; relative to the project folder unless absolute."""
    sha256: str | None = None
    """What its bytes have to hash to; none: those of the source."""


class RecoveryConfig(Section):
    """What ``eyas recover`` may do and needs to know."""

    may_stop: tuple[str, ...] = ()
    """Services of others that may be stopped, disabled and masked without asking."""
    container_host: str | None = None
    """A host (by name) whose ``systemctl`` is asked when the one here does not answer."""
    files: tuple[NeededFileConfig, ...] = ()
    """Files that a reboot may wipe; restored by hash."""
    stop_seconds: Annotated[float, Field(gt=0)] = 60.0
    """Patience with a service or process that was asked to stop."""
    silent_minutes: Annotated[float, Field(gt=0)] = 30.0
    """A running eyas without an event for so long counts as stuck."""
    watch_samples: Annotated[int, Field(ge=0)] = 3
    """New samples that recover waits for after it resumed the run."""
    watch_seconds: Annotated[float, Field(gt=0)] = 900.0
    """... at most so long."""


def _server_table(table: dict[str, Any]) -> dict[str, Any]:
    for key, value in table.items():
        simple = value if isinstance(value, list) else [value]
        if not all(isinstance(entry, bool | int | float | str | dict) for entry in simple):
            raise ValueError(
                f"{key}: an argument is text, a number, true, false, a list of these, or a table"
            )
    return table


ServerTable = Annotated[dict[str, Any], AfterValidator(_server_table)]
"""Arguments of a server by name: ``true`` is a bare flag, ``false`` leaves one out, a list gives
several words, a table is passed as JSON."""


class PatchConfig(Section):
    """An edit of an engine's source that a target needs, kept as a unified diff."""

    name: str
    """What it is called in ``eyas serve patch``."""
    package: str
    """Package in the engine's environment, as it is imported."""
    file: str
    """File within the package."""
    diff: str
    """The unified diff, relative to the project folder unless absolute."""
    sha256_before: str
    """SHA-256 of the file that the diff was made for."""
    sha256_after: str
    """SHA-256 of the file with the diff applied."""


class ServeConfig(Section):
    """Servers of the target: how they are started, found and stopped."""

    engine: Literal["auto", "vllm", "sglang"] = "auto"
    """What serves; ``auto`` is ``target.kind``, or vLLM when that is ``local``."""
    python: str = ""
    """Python of the engine's environment; empty: the one that runs eyas."""
    command: tuple[str, ...] = ()
    """Words that start the engine, before its arguments; empty: its module, run by ``python``."""
    replicas: Positive = 1
    """Servers that share the work."""
    urls: tuple[str, ...] = ()
    """Servers that somebody else started and stops; with these, eyas starts none."""
    model_name: str = ""
    """What the servers of ``urls`` call the target; empty: the name of its folder."""
    args: ServerTable = {}
    """Arguments in every mode, as in ``{ "tensor-parallel-size" = 8 }``."""
    args_generate: ServerTable = {}
    """Arguments of servers that answer prompts."""
    args_capture: ServerTable = {}
    """Arguments of servers that capture states."""
    args_draft: ServerTable = {}
    """Arguments of servers that serve an exported drafter."""
    environment: dict[str, str] = {}
    """Environment variables of a server."""
    replica_environment: tuple[dict[str, str], ...] = ()
    """Variables of each replica, in order, as ``CUDA_VISIBLE_DEVICES``; one table a replica."""
    dump_dir: str = ""
    """Where servers put captured states for eyas to take; empty: shared memory, or ``state/``."""
    dump_limit: Size | None = None
    """Most bytes of states that wait to be taken from one server; none: as the filesystem has."""
    start_seconds: Annotated[float, Field(gt=0)] = 900.0
    """How long a server may take until it answers; a model of 1T parameters takes 11 minutes."""
    stop_seconds: Annotated[float, Field(gt=0)] = 60.0
    """How long a server may take to end before it is killed."""
    api_key_env: str = ""
    """Environment variable that holds the servers' API key."""
    ca_file: str = ""
    """Certificates to trust for ``https`` in ``urls``."""
    patches: tuple[PatchConfig, ...] = ()
    """Edits of the engine's source, for ``eyas serve patch``."""

    @model_validator(mode="after")
    def _replicas_fit(self) -> ServeConfig:
        if self.replica_environment and len(self.replica_environment) != self.replicas:
            raise ValueError(
                f"serve.replica_environment has {len(self.replica_environment)} tables for "
                f"{self.replicas} replicas"
            )
        return self


class ClientConfig(Section):
    """How servers are asked for states and answers, and how patient eyas is with them."""

    tokens_in_flight: Positive = 16384
    """Prompt tokens sent to one server and not yet taken into the store."""
    requests_in_flight: Positive = 256
    """Most requests that one server has at a time."""
    connect_seconds: Seconds = 10.0
    """Patience with a connection."""
    first_byte_seconds: Seconds = 300.0
    """Patience with the reply to a captured prompt."""
    dump_seconds: Seconds = 60.0
    """Patience with a dump after its reply; within twice this time it is late, and taken."""
    answer_seconds: Seconds = 1800.0
    """Patience with a whole answer."""


NoticeKind = Literal["stalled", "stopped", "disk_low", "damage", "finished"]


class NotifyConfig(Section):
    """Who is told when something happens."""

    urls: tuple[str, ...] = ()
    """Addresses in apprise's form (``mailto://``, ``slack://``); ``env:NAME`` takes one from a variable."""
    on: tuple[NoticeKind, ...] = Field(
        default=("stalled", "stopped", "disk_low", "damage", "finished"), min_length=1
    )
    """What is worth a message."""


class EyasConfig(Section):
    """A whole ``eyas.toml``."""

    format: int = 1
    """Format of the project folder."""
    threads: Annotated[int, Field(ge=0)] = 0
    """CPU threads for arithmetic; 0: as many as there are cores."""
    target: TargetConfig
    data: DataConfig
    regenerate: RegenerateConfig = RegenerateConfig()
    extract: ExtractConfig = ExtractConfig()
    store: StoreConfig = StoreConfig()
    disk: DiskConfig = DiskConfig()
    expect: ExpectConfig | None = None
    drafter: DrafterConfig = DrafterConfig()
    train: TrainConfig = TrainConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    export: ExportConfig = ExportConfig()
    hosts: tuple[HostConfig, ...] = ()
    recovery: RecoveryConfig = RecoveryConfig()
    serve: ServeConfig = ServeConfig()
    client: ClientConfig = ClientConfig()
    notify: NotifyConfig = NotifyConfig()

    @model_validator(mode="after")
    def _answers_fit(self) -> EyasConfig:
        if self.regenerate.enabled and self.regenerate.max_new_tokens >= self.data.max_seq_len:
            raise ValueError(
                f"regenerate.max_new_tokens ({self.regenerate.max_new_tokens}) leaves no room for a "
                f"prompt within data.max_seq_len ({self.data.max_seq_len})"
            )
        return self
