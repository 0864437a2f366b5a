"""What may stand in ``eyas.toml``; every field is documented here and nowhere else."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from eyas.base.units import parse_bytes
from eyas.config.machines import HostConfig, NotifyConfig, RecoveryConfig
from eyas.config.section import Dtype, Fraction, Positive, Section, Size
from eyas.config.servers import ClientConfig, ServeConfig


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
    max_bytes: Size | None = None
    """Largest size of the store; none or 0: no bound. With a bound, samples are captured in waves of about
    half the room, trained, and released, so that training begins while states are still captured."""
    recapture: bool = False
    """With a bound: ``false`` trains a wave for all epochs before it is released; ``true`` captures every
    sample anew in each epoch, which mixes better and costs ``train.epochs`` times the captures."""

    @property
    def bound_bytes(self) -> int | None:
        """The bound in bytes; None without one."""
        return parse_bytes(self.max_bytes) or None if self.max_bytes is not None else None


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
    checkpoint_steps: Annotated[int, Field(ge=0)] = 0
    """A checkpoint after every so many steps as well; 0: by time alone."""
    keep_checkpoints: Annotated[int, Field(ge=1)] = 2
    """Newest checkpoints kept, beside the best."""
    validations: Annotated[int, Field(ge=1)] = 6
    """Validations over the run; the last is at its end."""
    max_bad_steps: Annotated[int, Field(ge=1)] = 20
    """Steps in a row without a finite loss or gradient before the run stops."""
    spike_ratio: Annotated[float, Field(gt=1)] = 2.0
    """A loss this many times the median of the last 64, and outside their usual spread, is named with its
    samples; its step counts."""
    processes: Annotated[int, Field(ge=0)] = 0
    """Processes on this machine that share each training step; 0: one for each GPU, or one without GPUs."""
    sharding: Literal["ddp", "fsdp"] = "ddp"
    """``ddp``: weights and optimizer are whole in each of several processes; ``fsdp`` (FSDP2) shards both."""
    trackers: tuple[Literal["tensorboard", "trackio", "wandb", "mlflow"], ...] = ()
    """Programs that are shown the training as it runs, beside ``drafter/metrics.jsonl``; each is an extra of
    the package."""

    @model_validator(mode="after")
    def _one_start(self) -> TrainConfig:
        if self.start_from is not None and "warm_start" in self.model_fields_set:
            raise ValueError("start_from and warm_start are two ways to begin; keep one of them")
        return self


class TreeConfig(Section):
    """EAGLE's dynamic tree of drafts, measured beside the chain."""

    depth: Annotated[int, Field(ge=1, le=16)] = 3
    """Longest way of drafts."""
    top_k: Annotated[int, Field(ge=1, le=64)] = 4
    """Drafts that get children at each depth, and children of each."""
    total_tokens: Annotated[int, Field(ge=1, le=512)] = 16
    """Drafts that the target reads in a round."""


class EvaluateConfig(Section):
    """Speculative decoding with the local target on held-out prompts."""

    prompts: str | None = None
    """File of held-out prompts; none: the validation conversations."""
    limit: Positive | None = None
    """Use at most this many prompts."""
    num_drafts: Annotated[int, Field(ge=1, le=16)] = 3
    """Tokens drafted per round (K of a chain)."""
    tree: TreeConfig | None = None
    """Decode the prompts with trees too; none: chains only."""
    max_new_tokens: Positive = 256
    """Longest answer in tokens."""
    batch_size: Positive = 16
    """Prompts decoded together when acceptance is measured."""
    timing_prompts: Annotated[int, Field(ge=0)] = 8
    """Prompts decoded one at a time, with and without the drafter, to measure speed."""


class ExportConfig(Section):
    """Checkpoints that engines load."""

    name: str = "eagle3"
    """Folder below ``exports/``, which vLLM and SGLang both load."""
    to: tuple[Literal["sglang", "vllm", "speculators"], ...] = ()
    """Further layouts, each in ``exports/NAME-LAYOUT`` (``eyas export --to``)."""
    min_acceptance_length: Annotated[float, Field(ge=0)] = 0.0
    """Refuse to export below this (exit code 15); 0 is no gate."""


class EyasConfig(Section):
    """A whole ``eyas.toml``."""

    format: int = 1
    """Format of the project folder."""
    threads: Annotated[int, Field(ge=0)] = 0
    """CPU threads for arithmetic, shared by training processes; 0: as many as there are cores."""
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
    def _bound_fits_budget(self) -> EyasConfig:
        bound, budget = self.store.bound_bytes, self.disk.budget
        if bound is not None and budget is not None and bound > parse_bytes(budget):
            raise ValueError(
                f"store.max_bytes ({self.store.max_bytes}) is more than disk.budget ({budget}) allows "
                "the whole project: the run would pause for ever"
            )
        return self

    @model_validator(mode="after")
    def _answers_fit(self) -> EyasConfig:
        if self.regenerate.enabled and self.regenerate.max_new_tokens >= self.data.max_seq_len:
            raise ValueError(
                f"regenerate.max_new_tokens ({self.regenerate.max_new_tokens}) leaves no room for a "
                f"prompt within data.max_seq_len ({self.data.max_seq_len})"
            )
        return self
