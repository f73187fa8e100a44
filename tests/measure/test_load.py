"""`llmcli load`: the ledger, the numbers, and what a file claims of its weights.

load_reports.txt has what `llmcli load` and `load --check` report of each of `CASES`.
"""

import json
import math
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf_bytes import STRING, pair, tensor
from gguf_bytes import gguf as gguf_file
from load_files import llama, write_gguf, writer
from needs import most_during, needs_kernels
from quantized_checkpoints import write_quantized
from safetensors.torch import save_file
from tensors import drawn
from tiny_checkpoints import gpt2_tensors, llama_tensors, write_gpt2, write_llama
from tokenizers import Tokenizer, models

import llmcli.commands.load.measure.numbers as numbers_module
import llmcli.commands.load.measure.run as run_module
from llmcli.checkpoints import open_checkpoint
from llmcli.commands.load.measure.ledger import claims, layout_check
from llmcli.commands.load.measure.numbers import Outliers, parameter_numbers
from llmcli.commands.load.measure.run import NO_DIGEST, check_files, measure_load
from llmcli.commands.load.report import folded, pooled
from llmcli.errors import LlmcliError
from llmcli.families import translate
from llmcli.graph.plan import parameters
from llmcli.inspect.statistics import Statistics
from llmcli.kernels import native
from llmcli.ops.quant import FORMATS, dequantize, quantize
from llmcli.records.ledger import LedgerEntry, Numbers
from llmcli.records.work import LoadTimings

NAN, INF = math.nan, math.inf
SIZE = sum(tensor.nbytes for tensor in llama_tensors().values())
NUMBERS = SIZE // 4
UP = "model.layers.{}.mlp.up_proj.weight"
FREQUENCIES = "model.layers.{}.self_attn.rotary_emb.inv_freq"
WHOLE = {"general__quantization_version": 2, "llama__vocab_size": 97, "split__tensors__count": 21}


def loaded(path, dtype="float32"):
    """What `llmcli load` tells of it."""
    checkpoint = open_checkpoint(path)
    return measure_load(checkpoint, LoadTimings(), device="cpu", dtype=dtype, quantize="auto")[1]


def checked(path):
    """What `llmcli load --check` tells of it."""
    return check_files(open_checkpoint(path), LoadTimings())


def check(report, name):
    """The check of that name."""
    return next(check for check in report.checks if check.name == name)


def write_sharded(folder, **metadata):
    """The tiny Llama in two shards with an index, whose `metadata` is the one given."""
    write_llama(folder)
    (folder / "model.safetensors").unlink()
    names = list(llama_tensors())
    shards = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, part in shards.items():
        save_file({name: llama_tensors()[name] for name in part}, folder / file)
    index = {name: file for file, part in shards.items() for name in part}
    document = {"metadata": metadata, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(document))
    return folder


def write_split(folder):
    """The same in three files of at most eight tensors, as `llama-gguf-split` makes them."""
    folder.mkdir()
    write_gguf(folder / "m", parts=8)
    return folder


@writer
def index(folder, document, **metadata):
    """Two shards whose index has other entries, too."""
    file = write_sharded(folder / "m", **metadata) / "model.safetensors.index.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | document))
    return file.parent


@writer
def with_gguf(folder, **how):
    return write_gguf(folder / "m.gguf", **how)


def padded(folder):
    path = write_gguf(folder / "m.gguf")
    path.write_bytes(path.read_bytes() + bytes(5))
    return path


@writer
def with_offsets(folder, offsets, size):
    """A GGUF file of two tensors that are there."""
    table = [tensor(name, (8,), 0, at) for name, at in zip("ab", offsets, strict=True)]
    names = [pair("general.architecture", STRING, "nobody"), pair("a", STRING, "b" * 40)]
    (folder / "m.gguf").write_bytes(gguf_file(names, table, bytes(size)))
    return folder / "m.gguf"


def tokens(count):
    vocabulary = {f"t{i}": i for i in range(count)}
    return {"tokenizer.json": Tokenizer(models.BPE(vocab=vocabulary, merges=[])).to_str()}


def head():
    return {"lm_head.weight": llama_tensors()["model.embed_tokens.weight"].clone()}


def alike(equal):
    """64 KiB twice, of which 12 are compared at first."""
    other = torch.zeros(128, 128)
    other[20, 3] = not equal
    return {FREQUENCIES.format(0): torch.zeros(128, 128), FREQUENCIES.format(1): other}


def planted(value):
    """A number in a matrix of the tiny Llama."""
    name = UP.format(1)
    tensor = llama_tensors()[name]
    tensor[3, 7] = value
    return llama({name: tensor})


@writer
def alone(folder, **tensors):
    """A file of tensors without a configuration."""
    save_file(tensors, folder / "x.safetensors")
    return folder / "x.safetensors"


def bad_bits(dtype, bits):
    """A tensor of ones with one number that is these bits."""
    tensor = torch.ones(4, 4).to(dtype)
    tensor.view(torch.uint8)[1, 2] = bits
    return alone(x=tensor)


def bad_scale(folder):
    """A GGUF file with a NaN for the scale of a block."""
    path = write_gguf(folder / "m.gguf")
    reader = gguf.GGUFReader(path, "r+")
    tensor = next(one for one in reader.tensors if one.name == "blk.0.ffn_up.weight")
    tensor.data[5, :2] = np.frombuffer(np.float16(np.nan).tobytes(), np.uint8)
    reader.data.flush()
    return path


def in_every_format(folder):
    values = torch.arange(-3.0, 9.0).view(3, 4)
    signed = "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 int8 int16 int32 int64"
    tensors = {kind: values.to(getattr(torch, kind)) for kind in signed.split()}
    tensors |= {kind: values.abs().to(getattr(torch, kind)) for kind in ("uint8", "bool")}
    return alone(**tensors, complex64=torch.complex(values, values))(folder)


@writer
def scaled(folder, scheme):
    return write_quantized(folder / "m", scheme)[0]


# what is in a checkpoint is `ok`, unless it says so
CASES = {
    "an index that tells the truth": index({}, total_size=SIZE, total_parameters=NUMBERS),
    **{
        f"an index that lies: {name} {value}": index({}, **{name: value})
        for name, value in [
            ("total_size", SIZE + 1), ("total_size", 0), ("total_size", str(SIZE)),
            ("total_size", [SIZE]), ("total_parameters", NUMBERS - 1), ("total_parameters", 1e99),
        ]
    },
    **{
        f"an index that is silent: {metadata}": index({"metadata": metadata})
        for metadata in (None, [], "total_size", {"total_size": None})
    },
    "the index of other files is not believed": llama(files={
        "model.safetensors.index.json":
            '{"metadata": {"total_size": 7}, "weight_map": {"x": "gone.safetensors"}}',
    }),
    "a GGUF file that tells the truth": with_gguf(**WHOLE),
    **{
        f"a GGUF file that lies: {key} {value}": with_gguf(**WHOLE | {key: value})
        for key, value in [("general__quantization_version", 1), ("split__tensors__count", 22)]
    },
    "names and labels are not read": with_gguf(
        general__size_label="8x7B", general__name="Mistral-7B-Instruct", general__file_type=2
    ),
    "a version of blocks where there are none": with_gguf(
        blocks=False, general__quantization_version=1
    ),
    "a head beside tied embeddings": llama(head(), tie_word_embeddings=True),
    "another head beside tied embeddings": llama(tie_word_embeddings=True),
    "a matrix that is there twice": llama({UP.format(1): llama_tensors()[UP.format(0)].clone()}),
    "tensors that a model computes": llama(alike(equal=True)),
    "tensors that are alike at their ends": llama(alike(equal=False)),
    "as many tokens as rows": llama(files=tokens(97)),
    "fewer tokens than rows": llama(files=tokens(90)),
    "more tokens than rows": llama(files=tokens(98)),
    "an end of text that no row has": llama(
        files=tokens(97) | {"generation_config.json": '{"eos_token_id": [2, 97, "x"]}'}
    ),
    "bytes that nothing owns": padded,
    "an exact GGUF file": with_offsets((0, 32), 64),
    "a gap after the header": with_offsets((32, 64), 96),
    "a gap after a tensor": with_offsets((0, 64), 96),
    "a gap at the end": with_offsets((0, 32), 65),
    "a tensor too few": llama(without="model.norm.weight"),
    "a tensor too short": llama({"model.norm.weight": torch.ones(31)}),
    "a model that nobody knows": llama(model_type="nobody"),
    "a broken tokenizer": llama(files={"tokenizer.json": "{"}),
    "a tokenizer of an unknown kind": with_gguf(tokenizer__ggml__model="nobody"),
    "a GGUF file in three parts": lambda folder: write_split(folder / "m"),
    "a NaN": planted(NAN),
    "an infinity": planted(INF),
    "a negative infinity": planted(-INF),
    "a scale that is no number": bad_scale,
    "a NaN in 8 bits": bad_bits(torch.float8_e4m3fn, 0x7F),
    "an infinity in 8 bits": bad_bits(torch.float8_e5m2, 0xFC),
    "an infinity of a complex number": alone(x=torch.full((4, 4), complex(0, INF))),
    "numbers of a file alone: none, and one": alone(none=torch.zeros(0, 3), one=torch.tensor(2.5)),
    "numbers of a file alone: in every format": in_every_format,
    "the ledger of GPT-2": lambda folder: write_gpt2(folder / "m"),
    "the ledger of a GGUF file": with_gguf(),
    "the ledger of a file alone": alone(one=torch.ones(2, 3), other=torch.ones(3).bool()),
    **{
        f"a tensor and its scale: {scheme}": scaled(scheme)
        for scheme in ("fp8-blocks", "float-tensor", "int-channel", "bitsandbytes")
    },
}  # fmt: skip
# of these the rows of the ledger for tensors with that in their names
LEDGERS = dict.fromkeys(
    ("the ledger of GPT-2", "the ledger of a GGUF file", "the ledger of a file alone"), ""
) | {"a tensor and its scale": "up_proj", "numbers of a file alone": ""}


def report_lines(look, path, title):
    """Lines of the report: claims, what is wrong, shared tensors, and rows that fill nothing.

    Or, for some titles, the rows of tensors with what `LEDGERS` says in their names.
    """
    part = LEDGERS.get(title.partition(": ")[0])
    try:
        report = look(path)
    except LlmcliError as error:
        return [f"refused: {error.message}".replace(str(path.parent), ".")]
    if report.ok:  # every byte of every tensor is in one line
        assert sum(line.bytes for line in report.ledger) == report.bytes.tensors
        assert sum(row.bytes for row in report.rows) == report.bytes.tensors
        checkpoint = open_checkpoint(path)
        assert {line.source for line in report.ledger} == set(checkpoint.tensors)
        if checkpoint.config is not None:  # each parameter once, in the model's order
            order = [spec.name for spec in parameters(translate(checkpoint)[0])]
            assert [line.parameter for line in report.ledger if line.parameter] == order
    said = [f"ok {report.ok}, fits {report.fits}, {report.files} files, {report.numbers} numbers"]
    for one in report.claims:
        mark = "✓" if one.ok else "✗" if one.must else "!"
        said.append(f"{mark} {one.name}: {one.what} says {one.says[:40]} · {one.holds}")
    said += [
        f"✗ check {one.name}: {one.value:g} at {one.where}" for one in report.checks if not one.ok
    ]
    said += [f"not finite: {report.not_finite}"] if report.not_finite else []
    said += [
        f"{line.parameter or line.source} has {one.nan} NaN, {one.inf} infinite, of these "
        f"{one.negative_inf} negative"
        for line in report.ledger
        if (one := line.numbers) is not None and one.finite < one.count
    ]
    fault = (report.fault or "").partition(": Cannot")[0]  # the rest are words of a library
    said += [f"fault: {fault}"] if fault else []
    said += [f"note: {note}" for note in report.notes if note != NO_DIGEST]
    said += [f"{one.kind}: {', '.join(one.names)} of {one.bytes} bytes" for one in report.shared]
    numbers = title.startswith("numbers")  # the order is then the library's
    for row in sorted(report.rows, key=lambda row: row.source) if numbers else report.rows:
        if row.reason if part is None else part in row.source:
            made = ", ".join(row.operations) or row.reason
            dtype = f"{row.dtype} dequantized" if row.dequantized else row.dtype
            said.append(
                f"{row.parameter or 'nothing'} is {row.source} {row.stored} {[*row.shape]}"
                f" × {row.tensors}, {row.bytes} bytes in {dtype}: {made or 'as it is'}"
            )
            if numbers and (one := row.numbers):
                said[-1] += f", {one.count} with {one.zeros} zeros, {one.min:g} to {one.max:g},"
                said[-1] += f" mean {one.mean:g} ± {one.std:.4f}"
    return [line.replace(str(path.parent), ".") for line in said]


def test_reports(tmp_path, as_written):
    found = {}
    for number, (name, write) in enumerate(CASES.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        path = write(folder)
        by_loading, by_looking = (report_lines(look, path, name) for look in (loaded, checked))
        title = name[:60]
        found[title] = by_loading
        if by_looking != by_loading:
            found[title] = [*by_loading, "--check", *by_looking]
    as_written(Path(__file__).parent / "load_reports.txt", found)


def test_a_vocabulary_of_another_size(tmp_path):
    """The key begins with the file's architecture, which need not be the configuration's type."""
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf"))
    config = replace(translate(checkpoint)[0], model_type="other")
    checkpoint.metadata["llama.vocab_size"] = 98
    found = next(one for one in claims(checkpoint, config, None) if one.name == "vocab_size")
    assert (found.says, found.holds, found.ok, found.must) == ("98", "97", False, True)


# the ledger: nothing of a file is forgotten, and nothing is reported twice


@pytest.mark.parametrize("kept", [pytest.param(True, marks=needs_kernels), False])
def test_blocks_are_reported_as_kept_or_as_dequantized(tmp_path, monkeypatch, kept):
    if not kept:
        monkeypatch.setattr(native, "level", lambda: None)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf"))
    given = {"dtype": "auto" if kept else "float32", "quantize": "auto"}
    model, report = measure_load(checkpoint, LoadTimings(), device="cpu", **given)
    assert report.ok, report
    query = next(line for line in report.ledger if line.parameter == "blocks.1.attn.W_q")
    norm = next(line for line in report.ledger if line.parameter == "blocks.1.ln1.w")
    assert (query.dtype, query.dequantized) == (("Q8_0", False) if kept else ("float32", True))
    assert (norm.dtype, norm.dequantized) == ("float32", False)
    stages = {stage.name: stage.bytes for stage in report.stages}
    packed = sum(
        model.decoder.weight(line.parameter).nbytes
        for line in report.ledger if line.dtype == "Q8_0"
    )
    assert stages.get("pack") == (packed if kept else None)
    assert stages["convert"] == report.bytes.weights - packed


def test_a_tensor_without_a_line_or_with_two_and_a_parameter_that_was_not_read_are_found(
    tmp_path, monkeypatch
):
    plain, looked, forgotten = run_module.ledger_lines, run_module._parameters, "blocks.1.mlp.W_up"

    def forgetful(ledger, *others):
        kept = tuple(entry for entry in ledger.entries if entry.parameter != forgotten)
        return plain(replace(ledger, entries=kept), *others)

    path = write_llama(tmp_path / "m")
    monkeypatch.setattr(run_module, "ledger_lines", forgetful)
    for report in (loaded(path), checked(path)):
        ledger = check(report, "ledger")
        assert (ledger.ok, report.ok, ledger.value) == (False, False, 48 * 32 * 4)
        assert ledger.where == "model.layers.1.mlp.up_proj.weight"
        assert check(report, "layout").where == "", "nothing is left over"
    monkeypatch.setattr(run_module, "ledger_lines", lambda *a: (*plain(*a), plain(*a)[0]))
    assert check(loaded(path), "ledger").value == 97 * 32 * 4
    monkeypatch.setattr(run_module, "ledger_lines", plain)
    monkeypatch.setattr(run_module, "_parameters", lambda *a: {
        name: found for name, found in looked(*a).items() if name != "ln_final.w"
    })
    filled = check(loaded(path), "parameters")
    assert (filled.ok, filled.value, filled.where) == (False, 32, "ln_final.w")


def line(parameter, source, **changes):
    values = {"stored": "F32", "shape": (2, 2), "bytes": 16} | changes
    return LedgerEntry(parameter=parameter, source=source, **values)


def test_layers_that_are_alike_are_one_row_and_others_are_not():
    rows = folded([
        line("embed.W", "wte"),
        *(line(f"blocks.{i}.ln1.w", f"h.{i}.n", stored="F16" if i == 2 else "F32")
          for i in range(5)),
        line("blocks.0.ln2.w", "h.1.n"),
        *(line(f"blocks.{i + 1}.ln1.b", f"h.{i}.b") for i in range(2)),
        line(None, "old.7.inv", reason="computed"),
        line(None, "old.9.inv", reason="computed"),
        line(None, "left", reason="computed"),
    ])  # fmt: skip
    assert [(row.parameter, row.source, row.tensors, row.bytes) for row in rows] == [
        ("embed.W", "wte", 1, 16), ("blocks.{0-1,3-4}.ln1.w", "h.{0-1,3-4}.n", 4, 64),
        ("blocks.2.ln1.w", "h.2.n", 1, 16), ("blocks.0.ln2.w", "h.1.n", 1, 16),
        ("blocks.{1-2}.ln1.b", "h.{0-1}.b", 2, 32),
        (None, "old.{7,9}.inv", 2, 32), (None, "left", 1, 16),
    ]


def test_a_row_has_the_numbers_of_all_its_layers_and_parts_of_a_fused_tensor_their_own(tmp_path):
    tensors = llama_tensors()
    report = loaded(write_llama(tmp_path / "m", tensors))
    row = next(row for row in report.rows if row.parameter == "blocks.{0-1}.mlp.W_up")
    both = torch.cat([tensors[f"model.layers.{i}.mlp.up_proj.weight"] for i in range(2)]).double()
    found = row.numbers
    assert found.count == both.numel()
    assert found.mean == pytest.approx(float(both.mean()), abs=1e-12)
    assert found.std == pytest.approx(float(both.std(correction=0)), rel=1e-12)
    assert (found.min, found.max) == (float(both.min()), float(both.max()))
    tensors = gpt2_tensors()
    lines = loaded(write_gpt2(tmp_path / "n", tensors)).ledger
    value = next(line for line in lines if line.parameter == "blocks.0.attn.W_v")
    part = tensors["h.0.attn.c_attn.weight"][:, 32:].double()
    assert value.numbers.mean == pytest.approx(float(part.mean()), abs=1e-12)
    assert value.numbers.max == float(part.max())


@pytest.mark.parametrize("look", [loaded, checked])
def test_a_model_in_parts_is_one_ledger(tmp_path, look):
    whole = look(write_gguf(tmp_path / "m.gguf"))
    report = look(write_split(tmp_path / "parts"))
    assert [line.source for line in report.ledger] == [line.source for line in whole.ledger]
    assert [line.numbers for line in report.ledger] == [line.numbers for line in whole.ledger]


def test_bytes_after_the_header_of_any_part_are_left_over(tmp_path):
    checkpoint = open_checkpoint(write_split(tmp_path / "parts"))
    assert len(checkpoint.files) == 3
    for part in checkpoint.files:
        tensors = {
            name: replace(info, offset=info.offset + 32 * (info.file == part))
            for name, info in checkpoint.tensors.items()
        }
        found = layout_check(replace(checkpoint, tensors=tensors))
        assert (found.value, found.where) == (32, "the end of the header")


# the numbers: statistics in pieces, in every format


@pytest.mark.parametrize("bad", [[], [5], [200_000], [0, 299_999], range(300_000)])
def test_numbers_are_those_of_all_pieces(bad):
    """More than are read together: 131,072."""
    x = drawn(300_000)
    x[[7, 200_011]] = 0.0
    x[list(bad)] = torch.tensor((NAN, INF, -INF)).repeat(100_000)[list(bad)]
    found = parameter_numbers(x.view(3, -1), transposed=False)
    finite = x[x.isfinite()].double()
    assert (found.count, found.finite) == (len(x), len(finite))
    assert (found.nan, found.inf) == (int(x.isnan().sum()), int(x.isinf().sum()))
    assert (found.negative_inf, found.zeros) == (int((x == -INF).sum()), int((x == 0).sum()))
    assert found.first_bad == (divmod(bad[0], 100_000) if bad else None)
    if not len(finite):
        assert all(map(math.isnan, (found.mean, found.std, found.min, found.max)))
        return
    assert found.mean == pytest.approx(float(finite.mean()), abs=1e-9)
    assert found.std == pytest.approx(float(finite.std(correction=0)))
    assert (found.min, found.max) == (float(finite.min()), float(finite.max()))


def test_rows_and_layers_pool_as_if_they_were_one():
    parts = drawn(3, 50, seed=1).double()
    parts[1, 4] = NAN
    parts[2] = INF

    def numbers(x):
        return parameter_numbers(x, transposed=False)

    together, whole = pooled([numbers(part) for part in parts]), numbers(parts.view(-1))
    assert (together.count, together.nan, together.inf) == (150, 1, 50)
    assert together.first_bad == (4,)
    for name in ("mean", "std", "min", "max", "zeros"):
        assert getattr(together, name) == pytest.approx(getattr(whole, name)), name
    assert isinstance(pooled([]), Numbers)


def test_a_transposed_parameter_is_not_copied_whole(monkeypatch):
    seen = []
    plain = Statistics.add
    monkeypatch.setattr(
        Statistics, "add", lambda self, part: (seen.append(part.numel()), plain(self, part))
    )
    monkeypatch.setattr("llmcli.inspect.statistics.AT_ONCE", 64)
    slot = torch.randn(16, 32).t()
    found = parameter_numbers(slot, transposed=True)
    assert max(seen) <= 64
    assert found.count == sum(seen) == 512


def test_a_large_vector_takes_no_more_memory_than_a_piece(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"x": torch.zeros(24 << 20)}, path)  # 96 MiB in a single row
    checked(path)  # what is imported and kept for later is there now
    _, most = most_during(lambda: checked(path))
    assert most < 40 << 20


def test_a_format_without_a_decoder_is_noted(tmp_path, monkeypatch):
    monkeypatch.setattr(numbers_module, "DECODERS", {})
    report = checked(write_gguf(tmp_path / "m.gguf"))
    assert report.notes == ("numbers in Q8_0 were not checked", NO_DIGEST)
    assert report.ok
    assert {line.stored for line in report.ledger if line.numbers is None} == {"Q8_0"}
    assert report.numbers == 5 * 32


# numbers that are probable of no tensor: found where a bit is wrong, and in no clean tensor


def outliers(x, piece=1 << 20):
    """The first number of each block that is an outlier, or of a hole."""
    blocks = Outliers(x.numel(), x.shape[-1])
    for part in x.reshape(-1).split(piece):
        blocks.add(part)
    return blocks.found() + blocks.holes()


def heavy(*shape):
    """Student's t with 3 degrees of freedom."""
    return drawn(*shape) / (drawn(3, *shape, seed=1).square().sum(0) / 3).sqrt()


def with_number(value, *shape, others=1.0):
    x = others * drawn(*shape)
    x.view(-1)[x.numel() // 3] = value
    return x


def with_row(row):
    x = drawn(512, len(row))
    x[170] = row
    return x


def clean_tensors():
    positions = torch.arange(512.0)[:, None] * 10_000 ** -(torch.arange(256.0) / 256)
    wide = positions.repeat_interleave(4, 1)
    return {
        "normal": drawn(1024, 1024), "in 16 bits": drawn(512, 512).bfloat16(),
        "heavy": heavy(512, 512), "a heavy vector": heavy(4096),
        "a super weight": with_number(100.0, 1024, 1024),
        "biases of thousands": with_number(1000.0, 576),
        "a norm with a large number": with_number(60.0, 2048, others=0.1),
        "a row of ones": with_row(torch.ones(576)), "a row of zeros": with_row(torch.zeros(576)),
        "columns of zeros": drawn(256, 2048) * ((torch.arange(2048) - 1024).abs() > 512),
        "rows of zeros that are no blocks": with_row(torch.zeros(2000)),
        "30 blocks of zeros": drawn(512, 512) * (torch.arange(1 << 18).view(512, -1) // 960 != 100),
        "rows of few numbers": torch.cat((drawn(512, 2048), 1.0 * (drawn(4, 2048) > 3))),
        "a large row": with_row(30 * drawn(576, seed=1)),
        "a few rows of another part": torch.cat((drawn(512, 256), 20 * drawn(8, 256, seed=1))),
        "positions": torch.cat((positions.sin(), positions.cos())),
        "positions, sines first": torch.cat((wide.sin(), wide.cos()), 1),
        "positions, cosines first": torch.cat((wide.cos(), wide.sin()), 1),
        "frequencies": 10_000 ** -(torch.arange(64.0) / 64),
        "decays": torch.arange(1.0, 65).log(),
        "ones": torch.ones(256, 256), "zeros": torch.zeros(256, 256),
        "one number of zeros": with_number(1.0, 256, 256, others=0.0),
        "scales of blocks": drawn(128, 96).abs() * 1e-3,
        "of rows of its own size each": drawn(512, 256) * drawn(512, 1, seed=1).exp(),
        "a single number": torch.ones(1), "nothing": torch.ones(0, 3),
    }  # fmt: skip


def test_none_in_what_tensors_are_like():
    clean = clean_tensors()
    for format in ("MXFP4", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0"):
        kind = gguf.GGMLQuantizationType[format]
        raw = torch.from_numpy(gguf.quants.quantize(heavy(512, 512).numpy(), kind))
        clean[format] = dequantize(raw.view(torch.uint8), format, dtype=torch.float32)
    assert {kind: found for kind, x in clean.items() if (found := outliers(x))} == {}


# Bits of the scale, then of the minimum, in half precision: the exponent begins at the tenth, the
# last is the sign. Each changes the scale at least 16-fold and the minimum at least 4-fold.
@pytest.mark.parametrize(("format", "bits"), [
    ("Q4_1", [14, 13, 12, 15]), ("Q4_1", [16 + 14, 16 + 11, 16 + 15]), ("Q8_0", [14]),
])
def test_a_wrong_bit_of_a_scale_is_found_in_its_block(format, bits):
    clean = quantize(0.1 * drawn(512, 576), format)
    size = FORMATS[format][1]
    for bit in bits:
        for block in (0, 1234, len(clean.view(-1)) // size - 1):
            raw = clean.clone()
            raw.view(-1)[block * size + bit // 8] ^= 1 << bit % 8
            assert outliers(dequantize(raw, format, dtype=torch.float32)) == [32 * block], bit


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_highest_bit_of_an_exponent_is_found_in_dense_numbers(dtype):
    x = (0.1 * drawn(512, 512)).to(dtype)
    size = dtype.itemsize
    x.view(-1).view(torch.uint8)[size * 77_777 + size - 1] ^= 1 << 6
    assert outliers(x) == [77_777 // 32 * 32]
    assert outliers(x.float().bfloat16() if size == 4 else x, piece=4096) == outliers(x)


def test_a_number_far_beyond_is_found_where_it_is_and_pieces_make_no_difference():
    assert outliers(with_number(1e9, 576)) == [192]
    x = with_number(1e6, 128, 512)
    x[100, :32] = -3.0
    right = [x.numel() // 96 * 32, 100 * 512]
    assert [outliers(x, piece) for piece in (1 << 20, 32, 32 * 77)] == [right] * 3
    for many in (11, 500):  # most of a row, and more than are compared with each other
        y = drawn(512, 576)
        y.view(-1)[32 * 1000 : 32 * (1000 + many)] *= 1e6
        for piece in (1 << 20, 32 * 77):
            assert len(found := outliers(y, piece)) >= min(many, 32)
            assert set(found) <= set(range(32_000, 32_000 + 32 * many, 32))


@pytest.mark.parametrize(("first", "blocks"), [(8000, 1216), (1801, 35), (1802, 31)])
def test_a_part_that_was_never_written_is_found(first, blocks):
    x = drawn(512, 576)
    x.view(-1)[32 * first : 32 * (first + blocks)] = 0
    assert [outliers(x, piece) for piece in (1 << 20, 32 * 77)] == [[32 * first]] * 2


def test_the_place_is_told_as_the_file_has_it_where_all_numbers_are_finite(tmp_path):
    x = drawn(300, 64)
    x[7, 33] = 1e20
    x.view(-1)[32 * 101 : 32 * 140] = 0
    save_file({"x": x, "whole": torch.full((300, 64), 2**60)}, tmp_path / "x.safetensors")
    report = checked(tmp_path / "x.safetensors")
    assert check(report, "outliers").where == "`x[7,32]`"
    assert "`x[50,32]`" in "".join(report.notes)
    assert not report.ok
    assert check(checked(write_gguf(tmp_path / "m.gguf")), "outliers").ok
    save_file({"x": with_number(INF, 300, 64)}, tmp_path / "x.safetensors")
    report = checked(tmp_path / "x.safetensors")
    assert report.not_finite
    assert check(report, "outliers").ok
