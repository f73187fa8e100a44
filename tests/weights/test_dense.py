"""What a weight promises, of dense ones: products, look-ups and numbers, wherever they lie."""

from unittest.mock import Mock

import pytest
import small_models
import torch
import torch.nn.functional as F
import zoo
from decoder_parameters import parameters_of
from tensors import drawn as numbers

from llmcli import processor
from llmcli.decoder.decoder import Decoder
from llmcli.graph.precision import Precision
from llmcli.nn.linear import Linear
from llmcli.ops.linear import linear, linear_fp32_out
from llmcli.ops.product import product_float32
from llmcli.weights import dense
from llmcli.weights.dense import Dense, writable
from llmcli.weights.routes import ExpertAssignment
from llmcli.weights.weight import Weight

N, K = 30, 8
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
PRODUCTS = {"matmul": linear, "matmul_fp32_out": linear_fp32_out, "matmul_float32": product_float32}


@pytest.fixture(params=["by rows", "by columns"])
def lying(request, monkeypatch):
    """An uninitialized matrix of that dtype, as the decoder's products would have it."""
    by_columns = request.param == "by columns"
    monkeypatch.setattr(dense, "lies_by_columns", lambda *asked: by_columns)

    def filled(dtype):
        weight = Dense.for_products((N, K), torch.device("cpu"), dtype)
        assert weight.tensor.stride() == ((1, N) if by_columns else (K, 1))
        writable(weight).copy_(numbers(N, K, dtype=dtype))
        return weight

    return filled


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_says_what_it_is(lying, dtype):
    weight = lying(dtype)
    assert weight.format == str(dtype).removeprefix("torch.")
    assert (weight.shape, weight.count) == ((N, K), N * K)
    assert weight.nbytes == N * K * dtype.itemsize
    vector = Dense(torch.zeros(K, dtype=dtype))
    assert (vector.shape, vector.nbytes) == ((K,), K * dtype.itemsize)
    wide = numbers(5, K, dtype=torch.float64, seed=1)  # what its products see makes the same ones
    x = wide.to(dtype)
    assert weight.quantized_input(x) is x
    assert torch.equal(weight.quantized_input(wide), x)


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("rows", [1, 7, 40])
@pytest.mark.parametrize("dtype", DTYPES)
def test_its_products_are_bit_for_bit_those_of_the_tensor(lying, dtype, rows, product):
    weight, x = lying(dtype), numbers(2, rows, K, dtype=dtype, seed=1)
    bias = numbers(N, dtype=dtype, seed=2)
    wide = dtype if product == "matmul" else torch.promote_types(dtype, torch.float32)
    for b in (None, bias):
        out = getattr(weight, product)(x, b)
        assert (out.shape, out.dtype) == ((2, rows, N), wide)
        assert torch.equal(out, PRODUCTS[product](x, weight.tensor, b))
        exact = F.linear(x.double(), weight.tensor.double(), None if b is None else b.double())
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(out.double(), exact, rtol=2 * eps, atol=64 * eps)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_looked_up_exactly_and_wide(lying, dtype):
    """Dense, they are a view in their own dtype and a copy in another."""
    weight, ids = lying(dtype), torch.tensor([[0, N - 1, 3], [3, 3, 1]])
    rows = weight.rows(ids)
    assert rows.dtype == torch.promote_types(dtype, torch.float32)
    assert torch.equal(rows, weight.tensor[ids].to(rows.dtype))
    for rows in (slice(None), slice(3, 11), slice(25, 99)):
        own = weight.dense(rows=rows)
        assert torch.equal(own, weight.tensor[rows])
        assert own.untyped_storage().data_ptr() == weight.tensor.untyped_storage().data_ptr()
        for other in DTYPES:
            assert torch.equal(weight.dense(other, rows=rows), own.to(other))


def test_parts_of_one_product_are_views_of_it(lying):
    weight = lying(torch.float32)
    parts = weight.split([10, 4, 16])
    assert [part.shape for part in parts] == [(10, K), (4, K), (16, K)]
    assert sum(part.nbytes for part in parts) == weight.nbytes
    writable(parts[1]).fill_(7)
    assert (weight.dense(rows=slice(10, 14)) == 7).all()
    x = numbers(3, K, dtype=torch.float32, seed=1)
    apart = torch.cat([part.matmul(x) for part in parts], -1)
    torch.testing.assert_close(apart, weight.matmul(x))


def test_the_segments_of_a_projection_are_the_parameters_by_name():
    config = zoo.CONFIGS["llama"]
    decoder = small_models.weights(config, torch.float32).decoder
    for block in decoder.blocks:
        mixer, ffn = block.parts.values()
        for part in (mixer.qkv, mixer.out, ffn.gate_up, ffn.down):
            assert isinstance(part, Linear)
            assert all(decoder.weight(name) is weight for name, weight in part.segments)
            stacked = torch.cat([weight.dense() for _, weight in part.segments])
            assert torch.equal(part.weight.dense(), stacked)
            x = numbers(1, 3, part.weight.shape[1], dtype=torch.float32)
            for y, (_, weight) in zip(part.split(part(x)), part.segments, strict=True):
                torch.testing.assert_close(y, weight.matmul(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tied_head_is_the_embedding(dtype):
    decoder = small_models.weights(zoo.CONFIGS["gpt2"], dtype).decoder
    assert decoder.weight("head.W") is decoder.weight("embed.W")
    assert "head.W" not in decoder.weight_names
    table = decoder.weight("embed.W").dense()
    x = numbers(2, table.shape[1], dtype=dtype)
    assert torch.equal(decoder.logits(x), product_float32(x, table, decoder.head_bias))
    parameters_of(decoder)["embed.W"].zero_()
    assert (decoder.logits(x) == 0).all()
    untied = small_models.weights(zoo.CONFIGS["llama"], dtype).decoder
    assert untied.weight("head.W") is not untied.weight("embed.W")
    assert "head.W" in untied.weight_names


def test_every_parameter_has_one_name_and_no_other():
    decoder = Decoder(zoo.CONFIGS["gpt2"], Precision.of("bfloat16"), device="meta")
    with pytest.raises(KeyError):
        decoder.weight("blocks.9.attn.W_q")
    assert {decoder.weight(name).format for name in decoder.weight_names} == {"bfloat16"}


def test_only_a_dense_weight_is_filled_number_by_number():
    with pytest.raises(TypeError, match="in Q4_K is not filled"):
        writable(Mock(spec=Weight, format="Q4_K"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_of_16_bits_have_products_of_few_shapes(monkeypatch, dtype):
    """Whatever the experts' numbers of rows are: oneDNN generates code for each of them."""
    experts, tokens, chosen = 40, 300, 3
    weight = Dense(numbers(experts, 12, K, dtype=dtype) / K**0.5)
    x_MK = numbers(tokens, K, dtype=dtype, seed=1)
    drawn = torch.rand(1, tokens, experts, generator=torch.Generator().manual_seed(2))
    chosen_BTK = (drawn * torch.linspace(1, 3, experts)).topk(chosen).indices
    routes = ExpertAssignment.of(chosen_BTK, static=False)
    expected = torch.stack([
        x_MK[token].double() @ weight.dense()[expert].double().T
        for expert, token in zip(routes.expert_N.tolist(), [*range(tokens)] * chosen, strict=True)
    ])  # fmt: skip
    seen, plain = [], dense.linear

    def noted(x, *args):
        seen.append(len(x))
        return plain(x, *args)

    monkeypatch.setattr(dense, "linear", noted)
    for native in (True, False):
        monkeypatch.setattr(processor, "has_bfloat16", lambda native=native: native)
        seen.clear()
        found = weight.matmul_routed(x_MK, routes)
        torch.testing.assert_close(found.double(), expected, rtol=1e-2, atol=2e-2)
        few = [rows for rows in seen if rows > 8]
        assert len(few) > 15
        if native and dtype == torch.bfloat16:
            assert all(rows % 32 == 0 for rows in few)
        else:
            assert sum(seen) == tokens * chosen
