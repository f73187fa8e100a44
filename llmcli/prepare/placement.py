"""Which layers of a model lie on which device. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import NamedTuple, Unpack

from llmcli.config.formats import PACKED
from llmcli.errors import UsageError
from llmcli.graph.memory import PlannedRun, memory_need
from llmcli.graph.precision import Precision
from llmcli.prepare.prepared import PrecisionOptions, Prepared
from llmcli.records.info import Device

_CONTEXT = 8192  # tokens of the caches that are reserved, if no context length is given


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The names of the device of each layer (`placed`) and of everything else (`home`)."""

    placed: tuple[str, ...]
    home: str
    precision: Precision

    @property
    def devices(self) -> str:
        """The devices that are needed, separated by commas."""
        return ",".join(dict.fromkeys((*self.placed, self.home)))

    def of(self, layer: int | None) -> str:
        """The device of a layer; None: of everything else."""
        return self.home if layer is None else self.placed[layer]


class Need(NamedTuple):
    """Bytes on one device: of each layer with its cache, of the weights outside of the layers, and
    of activations and libraries.
    """

    layers: Sequence[int]
    outside: int
    working: int


def listed(names: str) -> tuple[str, ...]:
    """`--device`: a name as it is, or several of CUDA devices that share the layers, `cpu` last.

    Raises UsageError for other lists, and a device named twice.
    """
    if "," not in names:
        return (names,)
    each = ["cuda:0" if name.strip() == "cuda" else name.strip() for name in names.split(",")]
    shared = each[:-1] if each[-1] == "cpu" else each
    if len(set(each)) < len(each) or not all(name.startswith("cuda:") for name in shared):
        raise UsageError(
            f"layers cannot be placed on the devices `{names}`",
            hint="name each CUDA device once, and cpu last: `--device cuda:0,cpu`",
        )
    return tuple(each)


def place(
    prepared: Prepared,
    devices: Sequence[Device],
    *,
    context: int | None = None,
    **options: Unpack[PrecisionOptions],
) -> Placement:
    """Fill each of `devices` with layers, as its free memory allows, before the next one.

    Caches count for one sequence of `context` tokens. The last device needed has the embedding,
    which may be the head's matrix, and the head. Layers on several devices have the arithmetic of
    the first one, but those on a CPU keep blocks packed. Raises UsageError for impossible options.
    """
    config, names = prepared.config, [one.device for one in devices]
    own = [prepared.precision(one.device, bfloat16=one.bfloat16, **options) for one in devices]
    if len(devices) == 1:
        return Placement(placed=(*names * len(config.layers),), home=names[0], precision=own[0])
    tokens = config.room(context or min(config.context, _CONTEXT))
    kinds = [own[0]] * len(devices)
    if names[-1] == "cpu":
        blocks = {name: kept for name, kept in own[-1].formats.items() if kept in PACKED}
        kinds[-1] = replace(own[0], formats=blocks, file_layout=False, portable=own[-1].portable)
    runs = [
        PlannedRun(config, kind, batch=1, context=tokens, cuda=name != "cpu", native=one.bfloat16)
        for name, kind, one in zip(names, kinds, devices, strict=True)
    ]
    counts = layers_on([_need(run) for run in runs], [one.free_bytes for one in devices])
    pairs, last = zip(names, counts, strict=False), len(counts) - 1
    placed = tuple(name for name, count in pairs for _ in range(count))
    precision = own[0]
    if set(placed) <= {names[last]}:
        precision = own[last]
    elif names[last] == "cpu":
        on_cpu = frozenset({None, *range(sum(counts[:-1]), len(placed))})
        there = {spec.name for spec in precision.parameters(config) if spec.layer in on_cpu}
        formats = {name: kept for name, kept in own[0].formats.items() if name not in there}
        formats |= {name: kept for name, kept in kinds[last].formats.items() if name in there}
        precision = replace(precision, formats=formats, on_cpu=on_cpu)
    return Placement(placed=placed, home=names[last], precision=precision)


def layers_on(needs: Sequence[Need], free: Sequence[int | None]) -> list[int]:
    """The number of layers on each device, up to the last one that is needed.

    Each is filled before the next one; the last has the weights outside of the layers, and all
    layers that fit nowhere. `free` bytes of each; None: as many as needed.
    """
    full: list[int] = []  # on devices before `need`'s, which leave out what is outside
    for need, room in zip(needs, free, strict=True):
        left = need.layers[sum(full) :]
        if room is None or sum(left) + need.outside + need.working <= room:
            return [*full, len(left)]
        full.append(sum(total + need.working <= room for total in accumulate(left)))
    full[-1] += len(needs[0].layers) - sum(full)
    return full


def _need(run: PlannedRun) -> Need:
    """Of a run whose layers are all in its precision."""
    config, precision, found = run.config, run.precision, Counter[int | None]()
    states = precision.states(config, batch=run.batch, capacity=run.context)
    for spec in (*precision.parameters(config), *states):
        found[spec.layer] += spec.bytes
    need = memory_need(run)
    working = need.prompt_bytes_estimate + need.runtime_bytes_estimate
    return Need([found[layer] for layer in range(len(config.layers))], found[None], working)


def placement_words(asked: Sequence[str], placed: Sequence[str], home: str) -> str:
    """`cuda:0 has layers 0–17 of 32, cpu the rest`; `asked`: all devices that were named."""
    if set(placed) <= {home}:
        full = " or ".join(asked[: asked.index(home)])
        return f"{home} has the whole model" + (f": no layer fits on {full}" if full else "")
    words, first = list[str](), 0
    for device, layers in groupby(placed):
        stop = first + len([*layers])
        span = f"layer {first}" if stop == first + 1 else f"layers {first}–{stop - 1}"
        words.append(f"{device} {span}")
        first = stop
    if placed[-1] == home:
        words.pop()
    words[0] = words[0].replace(" ", " has ", 1) + f" of {len(placed)}"
    return ", ".join([*words, f"{home} the rest"])
