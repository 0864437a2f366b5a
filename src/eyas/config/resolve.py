"""Values that follow from the configuration and the target, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from eyas.base.errors import ConfigError, TargetError
from eyas.config.schema import EyasConfig
from eyas.config.target_facts import TargetFacts, read_target_facts

BYTES_OF_DTYPE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
SAFETENSORS_DTYPE = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16"}
DEFAULT_DRAFT_VOCABULARY = 32_000


@dataclass(frozen=True)
class Derived:
    """One derived value and why it is what it is."""

    key: str
    value: object
    reason: str


@dataclass(frozen=True)
class Resolved:
    """A configuration with everything that follows from it.

    ``bytes_per_token_full`` counts aux states and a last state for every token;
    a store keeps fewer last states (only for rows whose next token is supervised).
    """

    model: Path
    facts: TargetFacts
    aux_layers: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    draft_vocab_limit: int
    bytes_per_token_aux: int
    bytes_per_token_last: int
    derived: tuple[Derived, ...]

    @property
    def bytes_per_token_full(self) -> int:
        return self.bytes_per_token_aux + self.bytes_per_token_last


def model_folder(config: EyasConfig, root: Path) -> Path:
    """The target's folder; a relative one counts from the project folder."""
    return (root / Path(config.target.model).expanduser()).resolve()


def resolve(config: EyasConfig, root: Path) -> Resolved:
    """Derive what the configuration leaves open.

    Raises:
        TargetError: the target's configuration cannot be read.
        ConfigError: a value contradicts the target's sizes.
    """
    model = model_folder(config, root)
    facts = read_target_facts(model)
    aux_layers, aux_reason = _aux_layers(config, facts)
    drafter = config.drafter
    heads = drafter.num_heads or facts.num_heads
    kv_heads = drafter.num_kv_heads or (facts.num_kv_heads if not drafter.num_heads else heads)
    head_dim = drafter.head_dim or (facts.head_dim if facts.head_dim % 2 == 0 else facts.hidden_size // heads)
    if heads % kv_heads:
        raise ConfigError(
            f"drafter.num_heads ({heads}) is no multiple of drafter.num_kv_heads ({kv_heads})",
            where=root / "eyas.toml",
            hint="set both, for example num_heads = 32 and num_kv_heads = 8",
        )
    intermediate = drafter.intermediate_size or facts.intermediate_size
    vocabulary = drafter.vocab_size or min(DEFAULT_DRAFT_VOCABULARY, facts.vocab_size)
    if vocabulary > facts.vocab_size:
        raise ConfigError(
            f"drafter.vocab_size ({vocabulary}) is larger than the target's vocabulary ({facts.vocab_size})",
            where=root / "eyas.toml",
            hint=f"set drafter.vocab_size to at most {facts.vocab_size}",
        )
    item = BYTES_OF_DTYPE[config.store.dtype]
    aux_bytes, last_bytes = len(aux_layers) * facts.hidden_size * item, facts.hidden_size * item
    told = "eyas.toml"
    derived = (
        Derived("target.model", str(model), told),
        Derived("extract.aux_layers", list(aux_layers), aux_reason),
        Derived("drafter.num_heads", heads, told if drafter.num_heads else "the target's"),
        Derived("drafter.num_kv_heads", kv_heads, told if drafter.num_kv_heads else "the target's"),
        Derived("drafter.head_dim", head_dim, told if drafter.head_dim else "the target's"),
        Derived(
            "drafter.intermediate_size",
            intermediate,
            told if drafter.intermediate_size else "the target's dense width",
        ),
        Derived(
            "drafter.vocab_size",
            vocabulary,
            told if drafter.vocab_size else "at most; fewer when fewer tokens are seen",
        ),
        Derived(
            "store bytes per token",
            aux_bytes + last_bytes,
            f"({len(aux_layers)} aux + 1 last) x {facts.hidden_size} x {item} bytes, "
            "the last only where the next token is supervised",
        ),
    )
    return Resolved(
        model=model,
        facts=facts,
        aux_layers=aux_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=intermediate,
        draft_vocab_limit=vocabulary,
        bytes_per_token_aux=aux_bytes,
        bytes_per_token_last=last_bytes,
        derived=derived,
    )


def _aux_layers(config: EyasConfig, facts: TargetFacts) -> tuple[tuple[int, ...], str]:
    wanted = config.extract.aux_layers
    if wanted == "auto":
        return facts.default_aux_layers(), f"auto: 2, n//2 and n-3 of {facts.num_layers} layers"
    layers = tuple(int(layer) for layer in wanted)
    if not layers or max(layers) > facts.num_layers:
        raise TargetError(
            f"extract.aux_layers {list(layers)} does not fit a target of {facts.num_layers} layers",
            why="a layer id k is the residual stream after k layers, 0 to n",
            hint="set extract.aux_layers to auto",
        )
    if list(layers) != sorted(set(layers)):
        raise ConfigError(
            f"extract.aux_layers {list(layers)} is not in rising order without repeats",
            why="engines sort and de-duplicate the ids, and the drafter's columns follow that order",
            hint=f"write {sorted(set(layers))}",
        )
    return layers, "eyas.toml"
