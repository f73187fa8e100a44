"""What `shapes` plans, held against what a run of the decoder has.

Names in their order, shapes, dtypes, shared memory, the cache, the weights, and the tensors of the
file that these were filled from.
"""

import torch
import torch.nn.functional as F

from llmcli.commands.shapes.measure import ShapesRequest
from llmcli.engine.session import Session
from llmcli.graph.graph import graph
from llmcli.inspect.kernel import mixer_of
from llmcli.inspect.passes import remembered
from llmcli.model import dtype_name
from llmcli.records.numbers import together


def roots(specs):
    """Name → the tensor that owns its memory: `shares`, followed to the end."""
    shares = {spec.name: spec.shares for spec in specs}

    def root(name):
        return root(shares[name]) if shares.get(name) else name

    return {spec.name: root(spec.name) for spec in specs}


def storages(tensors):
    """Name → where its storage begins; all of them are alive, so that none is used twice."""
    return {name: tensor.untyped_storage().data_ptr() for name, tensor in tensors.items()}


def partition(places):
    """The names that have a place in common."""
    groups = {}
    for name, place in places.items():
        groups.setdefault(place, set()).add(name)
    return sorted(map(sorted, groups.values()))


def departures(model, batch=2, tokens=3):
    """Aspect → names for which a prompt and a step after it differ from the plan.

    Empty where everything is as planned.
    """
    request = ShapesRequest(
        config=model.config, batch=batch, tokens=tokens, precision=model.precision
    )
    session = Session(model.decoder, batch, tokens + 1)
    prompt_BT = (torch.arange(tokens) % model.config.vocab).expand(batch, -1)
    wrong, calls = {}, []

    def compare(aspect, planned, was):
        found = [name for name in {**planned, **was} if planned.get(name) != was.get(name)]
        if found:
            wrong[aspect] = found

    for phase, ids in (("prefill", prompt_BT), ("decode", prompt_BT[:, :1])):
        calls.append(seen := {})
        session.extend(ids, logits="all", tap=seen.__setitem__)
        written = request.plan(phase).written
        compare(phase, {spec.name: _like(spec) for spec in written}, _likes(seen))
        if [*seen] != [spec.name for spec in written]:
            wrong[phase] = [*seen]
        _memory(wrong, f"memory of {phase}", written, storages(seen))
    derived = request.plan("decode").derived
    compare("derived", {spec.name: _like(spec) for spec in derived}, _derived(model, session, seen))
    kept, cached = request.states("decode"), session.state.tensors()
    compare("cache", {spec.name: _like(spec) for spec in kept}, _likes(cached))
    if sum(spec.bytes for spec in kept) != session.state.nbytes:
        wrong["bytes of the cache"] = [*cached]
    if changed := _changed(model, calls, cached):
        wrong["copies"] = changed
    weights = {name: model.decoder.weight(name) for name in model.decoder.weight_names}
    parameters = request.parameters()
    compare(
        "parameters",
        {one.name: (one.stored_shape or one.shape, one.dtype, one.bytes) for one in parameters},
        {name: (one.shape, one.format, one.nbytes) for name, one in weights.items()},
    )
    places = storages({name: one.memory()[0] for name, one in weights.items()})
    _memory(wrong, "memory of parameters", parameters, places)
    return wrong


def _like(spec):
    return spec.shape, spec.dtype


def _likes(tensors):
    return {name: (tuple(one.shape), dtype_name(one.dtype)) for name, one in tensors.items()}


def _memory(wrong, aspect, specs, places):
    planned, was = partition(roots(specs)), partition(places)
    if planned != was:
        wrong[aspect] = [names for names in was if names not in planned]


def _derived(model, session, step):
    """What no kernel writes in a step, from what it wrote, and keys from the cache."""
    of, at, cached = graph(model.config), session.state.lengths[0] - 1, session.state.tensors()
    kept = {state.holds: cached[state.name] for state in of.states.values()}
    found = {}
    for name in (name for name in of.nodes if not of.written(name)):
        rows = {  # of the tokens before, which the step has not, any will do
            one: kept[one] if one in kept else F.pad(step[one], (0, 0, at, 0))
            for one in of.sources(name)
        }
        found[name] = mixer_of(model, name).derive(name, rows, at, at + 1)
    return _likes(found)


def _changed(model, calls, cached):
    """Parts of the cache that are not what the calls wrote for them, bit for bit."""
    of, found = graph(model.config), []
    for state in of.states.values():
        if of.written(state.holds):
            at = of[state.holds].axes.index("T")
            rows = torch.cat([seen[state.holds][0] for seen in calls], at)
            if not torch.equal(remembered(of, state, rows), cached[state.name][0]):
                found.append(state.name)
    return found


def wrongly_filled(ledger, stored):
    """Parameters that were not filled from the tensors that `stored_tensors` names."""
    entries = {}
    for entry in ledger.entries:
        entries.setdefault(entry.target, []).append(entry)
    was = {
        name: (together([one.source for one in items]), items[0].stored, items[0].operations)
        for name, items in entries.items()
    }
    said = {
        name: (item.source, item.stored_format, item.operations) for name, item in stored.items()
    }
    return [name for name in {**was, **said} if said.get(name) != was.get(name)]
