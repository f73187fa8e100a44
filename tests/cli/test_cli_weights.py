"""`llmcli weights`: spectra, circuits, compositions as numpy has them, damage found and named."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from gguf_model import metadata, shapes, write_file
from small_models import random_blocks, random_model

from llmcli.commands.weights.command import WeightsOptions
from llmcli.commands.weights.measure import circuits, tensors
from llmcli.commands.weights.measure.circuits import Circuits, measure_composition, measure_heads
from llmcli.commands.weights.measure.tensors import Matrix, Scan, measure_spectra, measure_weights
from llmcli.config.formats import FORMATS
from llmcli.config.samples import MODELS, layer, llama
from llmcli.errors import NotFinite, UsageError
from llmcli.records.work import no_progress
from llmcli.weights.packed import Packed

WIDE = llama(
    *(layer(heads=4, kv_heads=2, head_dim=32, value_dim=32),) * 3, width=256, vocab=200,
)  # fmt: skip


def heads_of(config):
    return WeightsOptions(composition=True).heads(config)


@pytest.mark.parametrize("name", MODELS)
def test_every_small_model_is_undamaged_and_its_circuits_are_the_decoder_s(name):
    model = random_model(MODELS[name], torch.float64)
    report = measure_weights(model, no_progress)
    assert report.ok
    assert not report.damaged
    assert len(report.tensors) == len(model.decoder.weight_names)
    if name == "mamba-2 alone":
        with pytest.raises(UsageError, match="has no heads of queries and keys: a Mamba-2 mixer"):
            heads_of(model.config)
        return
    heads = heads_of(model.config)
    assert measure_heads(model, heads[::3], 7, no_progress).ok
    assert measure_composition(model, heads[::2], no_progress).ok


def test_spectra_are_numpy_s(monkeypatch):
    model = random_model(MODELS["experts"], torch.float64)
    names = [name for name in model.decoder.weight_names if ".W" in name]
    for at_once in (tensors.AT_ONCE, 64):  # in parts, by the Gram matrix
        monkeypatch.setattr(tensors, "AT_ONCE", at_once)
        report = measure_spectra(model, names, no_progress)
        assert report.ok
        found = {one.name: one for one in report.matrices}
        for name in names:
            whole = model.decoder.weight(name).dense().numpy()
            each = [(name, whole)] if whole.ndim < 3 else [
                (f"{name}[{at}]", one) for at, one in enumerate(whole)]  # fmt: skip
            for label, matrix in each:
                one, sigma = found[label], np.linalg.svd(matrix, compute_uv=False)
                np.testing.assert_allclose(one.singular_values, sigma, atol=1e-7 * sigma[0])
                share = sigma / sigma.sum()
                rank = np.exp(-(share * np.log(share)).sum())
                assert one.effective_rank == pytest.approx(rank, rel=1e-6)
                assert one.stable_rank == pytest.approx((sigma**2).sum() / sigma[0] ** 2)


def whole_circuits(model, layer, head):
    """`W_QK` and `W_OV` `[D, D]` of a grouped Llama, or of latents, written down once more."""
    of, part = lambda name: model.decoder.weight(name).dense().numpy(), f"blocks.{layer}.attn"
    ln, a = of(f"blocks.{layer}.ln1.w"), model.config.layers[layer].sublayers[0][0].part
    kv = head * a.kv_heads // a.heads

    def rows(name, at, size):
        return of(f"{part}.{name}")[at * size : (at + 1) * size]

    if hasattr(a, "rank"):
        down = of(f"{part}.kv_latent_norm.w")[:, None] * of(f"{part}.W_kv_latent")
        content, latent = of(f"{part}.W_q_latent"), of(f"{part}.q_latent_norm.w")[:, None]
        q = np.concatenate([rows("W_q", head, a.content), rows("W_q_pe", head, a.rope.dims)])
        q = q @ (latent * content)
        k = np.concatenate([rows("W_k", head, a.content) @ down, of(f"{part}.W_k_pe")])
        v = rows("W_v", head, a.value_dim) @ down
    else:
        q, k = rows("W_q", head, a.head_dim), rows("W_k", kv, a.head_dim)
        v = rows("W_v", kv, a.value_dim)
        if a.qk_norm is not None:
            q, k = of(f"{part}.q_norm.w")[:, None] * q, of(f"{part}.k_norm.w")[:, None] * k
    o = of(f"{part}.W_o")[:, head * a.value_dim : (head + 1) * a.value_dim]
    return (q * ln).T @ (k * ln), o @ (v * ln)


@pytest.mark.parametrize("name", ["llama", "qk norm", "one key head", "latent attention"])
def test_heads_and_compositions_are_those_of_whole_matrices(name):
    """Against TransformerLens' definitions: left OV, right QK, QKᵀ and OV, norms over norms."""
    model = random_model(MODELS[name], torch.float64)
    heads = [at for at in heads_of(model.config) if at[0] != 1 or name != "latent attention"]
    heads = [at for at in heads if at[0] < 2]
    report = measure_composition(model, heads, no_progress)
    whole = [whole_circuits(model, *at) for at in heads]
    norm = np.linalg.norm
    for into, (qk, ov) in enumerate(whole):
        for source, (_, left) in enumerate(whole):
            found = [of[into, source] for of in (report.q, report.k, report.v)]
            if heads[source][0] >= heads[into][0]:
                assert np.isnan(found).all()
                continue
            wanted = [norm(m @ left) / norm(m) / norm(left) for m in (qk.T, qk, ov)]
            np.testing.assert_allclose(found, wanted, rtol=1e-5)
    assert report.baseline == pytest.approx(model.config.width**-0.5)
    final = model.decoder.weight("ln_final.w").dense().numpy()
    embed, head = (model.decoder.weight(of).dense().numpy() for of in ("embed.W", "head.W"))
    for one, (qk, ov) in zip(measure_heads(model, heads, 3, no_progress).heads, whole, strict=True):
        for sigma, matrix in ((one.qk, qk), (one.ov, ov)):
            all_of = np.linalg.svd(matrix, compute_uv=False)
            np.testing.assert_allclose(sigma, all_of[: len(sigma)], atol=1e-12)
        eigen = np.linalg.eigvals((head * final) @ ov @ embed.T)
        assert one.copying == pytest.approx(eigen.sum().real / np.abs(eigen).sum(), abs=1e-6)
        x = embed[3] / np.sqrt((embed[3] ** 2).mean())
        logits = (head * final) @ ov @ x
        token, value = one.writes[0]
        assert (token.id, value) == (logits.argmax(), pytest.approx(logits.max()))
        scores = embed / np.sqrt((embed**2).mean(1, keepdims=True)) @ (qk.T @ x)
        assert one.seeks[0][0].id == scores.argmax()


@pytest.mark.parametrize("name", ["llama", "one key head", "keys of their own", "wide values"])
def test_a_single_token_s_value_is_the_circuit_times_its_stream(name):
    """The pattern of one token is 1, so the decoder's own z is what its values are."""
    model, seen = random_model(MODELS[name], torch.float64), {}
    model.decoder(torch.tensor([[5]]), tap=lambda n, x: seen.setdefault(n, x[0]))
    x_D = (seen["blocks.1.resid_pre"] / seen["blocks.1.ln1.scale"])[0]
    for head in range(4):
        own = Circuits(model).factors(1, head)[2] @ x_D
        torch.testing.assert_close(own, seen["blocks.1.attn.z"][head, 0])


# Where a block of a format has its float16 scale, and scales of its parts; others of gguf's
SCALES = {
    "Q4_K": (0, slice(4, 16)), "Q5_K": (0, slice(4, 16)), "Q6_K": (208, slice(192, 208)),
    "Q3_K": (108, slice(96, 108)), "Q2_K": (80, slice(16)), "IQ4_XS": (0, slice(2, 8)),
    **dict.fromkeys(("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"), (0, None)),
}  # fmt: skip


@pytest.mark.parametrize("bit", [12, 13])
@pytest.mark.parametrize("format", SCALES)
def test_a_flipped_bit_of_a_scale_is_found_in_every_format(format, bit):
    generator, kind = torch.Generator().manual_seed(0), FORMATS[format]
    drawn, (at, parts) = torch.randn(64, 1024, generator=generator) * 0.02, SCALES[format]
    drawn[:, 700] *= 30  # an outlier dimension, a large row, and a number as large models have it
    drawn[40] *= 20
    drawn[9, 100] = 1.5
    if parts is None:
        whole = quants.quantize(drawn.numpy(), GGMLQuantizationType[format])
        raw = torch.from_numpy(whole.copy()).view(64, -1, kind.bytes)
    else:
        raw = random_blocks(format, 64, 1024, generator).view(64, -1, kind.bytes)
        raw[..., parts] = 0x55
        raw[..., at : at + 2] = raw[0, 0, at : at + 2]

    def damage():
        weight = Packed(format, (64, 1024), torch.device("cpu"))
        weight.write(torch.arange(64), raw.flatten(1))
        return Scan(Matrix("w", weight)).findings()[0]

    assert damage() == []
    raw[21, 2, at : at + 2].view(torch.int16)[0] ^= 1 << bit
    (found,) = damage()
    assert (found.what, found.row) == ("block", 21)
    assert found.columns == (2 * kind.block, 3 * kind.block - 1)
    assert found.ratio > 5


def test_large_dimensions_are_outliers_and_flipped_exponents_are_damage():
    model = random_model(WIDE, torch.float32)
    weight = model.decoder.weight("blocks.1.mlp.W_up").tensor
    weight[:, 17] *= 30
    weight[3, 100] = 20 * weight.std()
    report = measure_weights(model, no_progress)
    assert report.ok
    found = [(one.name, one.what, one.row, one.columns) for one in report.outliers]
    assert ("blocks.1.mlp.W_up", "column", None, (17, 17)) in found
    assert ("blocks.1.mlp.W_up", "number", 3, (100, 100)) in found
    down = model.decoder.weight("blocks.1.attn.W_o").tensor
    bits = down[5].view(torch.int32)
    bits[77] = bits[77] ^ (1 << 30)
    down[7] = 0
    model.decoder.weight("blocks.2.mlp.W_gate").tensor[2, 3] = torch.nan
    report = measure_weights(model, no_progress)
    found = {(one.name, one.what, one.row, one.columns) for one in report.damaged}
    assert found == {
        ("blocks.1.attn.W_o", "number", 5, (77, 77)), ("blocks.1.attn.W_o", "zeros", 7, None),
        ("blocks.2.mlp.W_gate", "not finite", 2, (3, 3)),
    }  # fmt: skip
    assert not report.checks[0].ok
    heads = heads_of(model.config)
    down[0, 0] = torch.nan
    for measure, what in (
        (lambda: measure_spectra(model, ["blocks.2.mlp.W_gate"], no_progress), "W_gate"),
        (lambda: measure_heads(model, heads, None, no_progress), "output of head 1.0"),
        (lambda: measure_composition(model, heads, no_progress), "output of head 1.0"),
    ):
        with pytest.raises(NotFinite, match=what):
            measure()


def test_a_flipped_scale_in_a_file_is_named(cli, tmp_path):
    drawn, sizes = torch.Generator().manual_seed(0), shapes(128, 256)
    tensors_of = {}
    for name, shape in sizes.items():
        x = torch.randn(shape, generator=drawn) * 0.05
        plain = len(shape) == 1
        packed = (x + 1 if plain else x).numpy()
        if not plain:
            packed = quants.quantize(packed, GGMLQuantizationType.Q4_0)
        tensors_of[name] = 0 if plain else 2, bytearray(packed.tobytes()), shape
    head = metadata(embedding_length=128, feed_forward_length=256)
    write_file(tmp_path / "good.gguf", head, tensors_of)
    good = cli("weights", "-m", str(tmp_path / "good.gguf"), "--json")
    assert (good.code, good.json()["damaged"]) == (0, [])
    tensors_of["blk.0.ffn_up.weight"][1][(33 * 4 + 2) * 18 + 1] ^= 1 << 4  # the scale's bit 12
    write_file(tmp_path / "bad.gguf", head, tensors_of)
    bad = cli("weights", "-m", str(tmp_path / "bad.gguf"))
    assert bad.code == 1
    words = " ".join(bad.out.split())
    assert "damaged: blocks.0.mlp.W_up row 33 columns 64–95: scale " in words


def test_faults_turn_the_checks_red(monkeypatch):
    model = random_model(MODELS["llama"], torch.float64)
    heads, own = heads_of(model.config), tensors.singular_values

    def failed(report):
        return [check.name for check in report.checks if not check.ok]

    with monkeypatch.context() as patch:  # all queries read the first keys
        patch.setattr(Circuits, "kv_head", lambda self, layer, head: 0)
        assert failed(measure_heads(model, heads, None, no_progress)) == ["products"]
    with monkeypatch.context() as patch:
        patch.setattr(circuits, "product_values", lambda left, right: np.ones(8))
        assert "spectrum" in failed(measure_heads(model, heads, None, no_progress))
        patch.setattr(tensors, "singular_values", lambda *x: own(*x) * 1.01)
        assert failed(measure_spectra(model, ["embed.W"], no_progress)) == ["spectrum"]
    with monkeypatch.context() as patch:  # a part of rows that is read twice
        patch.setattr(Matrix, "__iter__", lambda self: iter([self.rows(0, 1 << 20)] * 2))
        patch.setattr(tensors, "distance", lambda *of: 0.0)
        assert failed(measure_weights(model, no_progress)) == ["read"]
    with monkeypatch.context() as patch:
        rows = Matrix.rows
        patch.setattr(Matrix, "rows", lambda self, *span: rows(self, *span) * 1.001)
        assert failed(measure_weights(model, no_progress)) == ["products"]
    with monkeypatch.context() as patch:
        factors, calls = Circuits.factors, iter(heads)  # of the heads, not of the check

        def turned(*at):
            q, k, v, o = factors(*at)
            return q, k if next(calls, None) is None else k.roll(1, 1), v, o

        patch.setattr(Circuits, "factors", turned)
        assert failed(measure_composition(model, heads, no_progress)) == ["composition"]
