"""What a sweep is supplied with: models by their names, ceilings, the peer engine."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

from llmcli.commands.bench.report.results import BenchRequest, EngineInfo, Settings
from llmcli.commands.bench.streams import Status
from llmcli.errors import LlmcliError
from llmcli.loading.arithmetic import quantize_without_effect
from llmcli.shell.exits import SIGNALS
from llmcli.shell.headers import opened_headers
from llmcli.shell.options import ModelOptions
from llmcli.shell.output import Output

if TYPE_CHECKING:
    from llmcli.checkpoints import Checkpoint
    from llmcli.commands.bench.measure.engine import Counted, Engine
    from llmcli.commands.bench.measure.loader import Loader
    from llmcli.records.ceilings import Ceilings
    from llmcli.records.checks import ViewCheck


class Suppliers:
    """What a sweep is supplied with: engines, ceilings, and the facts in headers.

    `models` are those that were loaded, as documents describe them. A context manager: headers
    that were fetched for shapes alone go at its end.
    """

    def __init__(self, request: BenchRequest, out: Output, status: Status) -> None:
        self.models: dict[tuple[str, ...], dict[str, Any]] = {}
        self._request = request
        self._out = out
        self._status = status
        self._stack = ExitStack()
        self._loader: Loader | None = None
        self._same: dict[tuple[str, str, str], ViewCheck] = {}

    def __enter__(self) -> Suppliers:
        return self

    def __exit__(self, *_: object) -> None:
        if self._loader is not None:
            self._loader.close()
        self._stack.close()

    def load(self, settings: Settings) -> Engine:
        """This program's engine. Raises what opening and loading the model do."""
        from llmcli.commands.bench.measure.loader import Loader

        if self._loader is None:
            drawn = self._request.seed if self._request.random_weights else None
            self._loader = Loader(
                self._open, headers=self._headers, quantize=self._request.quantize,
                random_weights=drawn, progress=self._status,
            )  # fmt: skip
        engine = self._loader(settings)
        SIGNALS.check()  # a signal's exception may have got lost in a library
        model = self._loader.model
        info = engine.info
        key = (settings.model, info.device, info.weight_format, info.product_format)
        if model is not None and key not in self.models:
            if model.config.embedding.positions is None:  # beyond learned ones nothing runs
                self._note_length(settings.model, model.config.context)
            if not self._request.random_weights:
                self._note_quantize(settings.model, model.checkpoint)
            self.models[key] = model.describe()
            self._tell(f"loaded {settings.model} in {engine.info.load_s or 0:.3g} s: "
                       f"{engine.info.formats} on {engine.info.device}")  # fmt: skip
        return engine

    def known(self, settings: Settings) -> EngineInfo | None:
        """What the headers say of a model that could not be loaded, if they are here."""
        return None if self._loader is None else self._loader.known(settings)

    def peer(self, settings: Settings) -> Engine:
        """The engine of `--against` with the same weights, compared with ours once."""
        from llmcli.commands.bench.measure.peers.peer import open_peer, same_model

        model = None if self._loader is None else self._loader.model_for(settings)
        if model is None or self._request.against is None:
            raise LlmcliError("the model could not be loaded")
        engine = open_peer(self._request.against, model, settings)
        weights = model.arithmetic.weight_format(model.config)
        key = (settings.model, engine.info.device, weights)
        if key not in self._same:
            same = same_model(model, engine, threads=settings.n_threads, seed=self._request.seed)
            if self._same:  # the names of a document's checks differ
                same = replace(same, name=f"{same.name}_{len(self._same) + 1}")
            self._same[key] = replace(same, words=f"{', '.join(key)}: {same.words}")
            if not same.ok:
                self._status.erase()
                self._out.note(
                    f"{engine.info.engine} does not compute what llmcli does with "
                    f"`{settings.model}`: KL {same.value:.2g} nats, where rounding explains "
                    f"{same.tolerance:.2g}"
                )
        return engine

    @property
    def checks(self) -> tuple[ViewCheck, ...]:
        """Whether the two engines compute the same: each model, device and weight format once."""
        return tuple(self._same.values())

    def ceilings(self, engine: Counted, working_set: int) -> Ceilings | None:
        """What the machine can do at most with the threads and numbers of `engine`.

        `working_set`: bytes that a step of its longest test reads again and again.
        Of shapes alone: what it could do with such a model on the device that it would take.
        """
        if not self._request.ceilings:
            return None
        import torch

        from llmcli.devices import resolve_device
        from llmcli.measure.ceilings import measure_ceilings
        from llmcli.ui.machine import ceiling_words

        meta = engine.info.device == "meta"
        found = measure_ceilings(
            resolve_device("auto" if meta else engine.info.device),
            engine.numbers,
            threads=torch.get_num_threads(),
            working_set=working_set,
            progress=self._status,
        )
        where = f"{found.device}, {engine.numbers.products}"
        self._tell(f"ceilings ({where}): {', '.join(ceiling_words(found))}")
        return found

    def _open(self, name: str) -> tuple[Checkpoint, float]:
        """The checkpoint, and the seconds that its headers took once they were there."""
        if self._request.shapes_only:
            options = ModelOptions(
                model=name, revision=self._request.revision, offline=self._request.offline
            )
            begin = perf_counter()
            checkpoint, _ = self._stack.enter_context(opened_headers(options, self._out))
            return checkpoint, perf_counter() - begin
        from llmcli.checkpoints import open_checkpoint
        from llmcli.checkpoints.locate import find

        name, path = find(
            name,
            revision=self._request.revision,
            offline=self._request.offline,
            progress=self._status,
            note=self._out.note,
        )
        begin = perf_counter()
        return open_checkpoint(path, name=name), perf_counter() - begin

    def _headers(self, name: str) -> Checkpoint:
        """The checkpoint of a model that is not to be loaded: nothing is fetched for it."""
        from llmcli.checkpoints import open_checkpoint
        from llmcli.checkpoints.locate import find

        if self._request.shapes_only:
            return self._open(name)[0]
        name, path = find(name, revision=self._request.revision, offline=True)
        return open_checkpoint(path, name=name)

    def _note_length(self, name: str, trained: int) -> None:
        """Once a model: speed is speed there too, but nobody reads so long a text with it."""
        longest = self._request.longest.capacity
        if longest > trained and not any(known == name for known, *_ in self.models):
            self._status.erase()
            self._out.note(
                f"tests of {longest:,} tokens go beyond the {trained:,} that `{name}` was trained "
                "with"
            )

    def _note_quantize(self, name: str, checkpoint: Checkpoint) -> None:
        """Once a model, where `--quantize` changes nothing of it."""
        words = quantize_without_effect(checkpoint, self._request.quantize)
        if words and not any(known == name for known, *_ in self.models):
            self._status.erase()
            self._out.note(words)

    def _tell(self, words: str) -> None:
        if self._request.verbose:
            self._status.erase()
            self._out.note(words)
