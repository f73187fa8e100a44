"""Chat templates as published: the ids are those of transformers' `apply_chat_template`.

The texts are read from a pinned wheel of TRL, which keeps models' templates as they were published
to tell the models apart. They are no part of this repository.
"""

import hashlib
import json
import re
import zipfile
from dataclasses import dataclass
from datetime import date

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Library

from llmcli.checkpoints import open_checkpoint
from llmcli.checkpoints.wheel import download
from llmcli.errors import CheckpointError
from llmcli.shell.conversations import read_conversation
from llmcli.shell.encoding import ChatOptions, pieces
from llmcli.shell.prompts import Prompt
from llmcli.text import load_tokenizer

WHEEL = "trl==1.16.0"
DIGEST = "97bf33c13ab71202d4d948e5e089dedc788a43109cb623c9e6a98875f2348124"

pytestmark = pytest.mark.real


@dataclass(frozen=True)
class Published:
    """A template's model, its special tokens, and `--set` that reasoning hangs on.

    `parts`: it reads contents that are lists of parts, and nothing of a text.
    """

    model: str
    bos: str = "<bos>"
    eos: str = "<eos>"
    reasoning: tuple[str, ...] = ()
    parts: bool = False


THINKING = ("enable_thinking=true", "enable_thinking=false")
GEMMA4 = (*THINKING, "preserve_thinking=true")
NEMOTRON = (*THINKING, "truncate_history_thinking=false")
DEEPSEEK = "<｜begin▁of▁sentence｜>"
LLAMA3 = "<|begin_of_text|>"
TEMPLATES = {
    "cohere": Published("CohereLabs/aya-expanse-8b", "<BOS_TOKEN>"),
    "cohere2": Published("CohereLabs/tiny-aya-earth", "<BOS_TOKEN>"),
    "deepseek_r1_distill": Published("DeepSeek-R1-Distill", DEEPSEEK),
    "deepseekv3": Published("DeepSeek-V3", DEEPSEEK),
    "diffusion_gemma": Published("google/diffusiongemma-26B-A4B-it", reasoning=GEMMA4),
    "gemma": Published("Gemma and Gemma 2"),
    "gemma3": Published("google/gemma-3"),
    "gemma4": Published("google/gemma-4-E2B-it at 6b7e72c", reasoning=THINKING),
    "gemma4_v2": Published("google/gemma-4-E2B-it at 4742fe8", reasoning=THINKING),
    "gemma4_v3": Published("google/gemma-4-E2B-it at b446025", reasoning=THINKING),
    "gemma4_v4": Published("google/gemma-4-E2B-it at 905e84b", reasoning=THINKING),
    "gemma4_v5": Published("google/gemma-4-E2B-it at 8995379", reasoning=GEMMA4),
    "glm4moe": Published("GLM-4-MoE", reasoning=THINKING),
    "gptoss": Published("GPT-OSS", reasoning=("reasoning_effort=low", "reasoning_effort=high")),
    "idefics3": Published("HuggingFaceM4/Idefics3-8B-Llama3", parts=True),
    "lfm2": Published("LiquidAI/LFM2"),
    "lfm2_v2": Published("LiquidAI/LFM2-1.2B since 40f3da0"),
    "lfm2_2_5": Published("LiquidAI/LFM2.5-230M", reasoning=("preserve_thinking=true",)),
    "lfm2_2_5_v2": Published(
        "LiquidAI/LFM2.5-230M since 13a5383", reasoning=("preserve_thinking=true",)
    ),
    "lfm2_2_5_vl": Published("LiquidAI/LFM2.5-VL-3B", reasoning=("preserve_thinking=true",)),
    "llama3": Published("Llama 3", LLAMA3),
    "llama3_1": Published("Llama 3.1", LLAMA3),
    "llama3_2": Published("Llama 3.2", LLAMA3),
    "llava_next": Published("llava-hf/llava-v1.6-mistral-7b-hf", parts=True),
    "muse_glimmer": Published(
        "meta-models/Muse-Glimmer-30B",
        reasoning=("reasoning_strength=low", "reasoning_strength=high"),
    ),
    "nemotron_3_nano": Published("nvidia/NVIDIA-Nemotron-3-Nano", reasoning=NEMOTRON),
    "nemotron_3_super": Published(
        "nvidia/NVIDIA-Nemotron-3-Super", reasoning=(*NEMOTRON, "low_effort=true")
    ),
    "nemotron_3_ultra": Published(
        "nvidia/NVIDIA-Nemotron-3-Ultra", reasoning=(*NEMOTRON, "medium_effort=true")
    ),
    "nemotron_3_5_lightning": Published("nvidia/NVIDIA-Nemotron-3.5-Lightning", reasoning=NEMOTRON),
    "phi3": Published("Phi-3", eos="<|endoftext|>"),
    "phi3_5": Published("Phi-3.5", eos="<|endoftext|>"),
    "qwen2_5": Published("Qwen2.5"),
    "qwen2_5_vl": Published("Qwen2-VL and Qwen2.5-VL"),
    "qwen3": Published("Qwen3", reasoning=THINKING),
    "qwen3_instruct_2507": Published("Qwen/Qwen3-4B-Instruct-2507"),
    "qwen3_vl": Published("Qwen3-VL"),
    "qwen3_5_think": Published("Qwen3.5-4B and larger", reasoning=THINKING),
    "qwen3_5_nothink": Published("Qwen3.5-2B and smaller", reasoning=THINKING),
    "qwen3_6": Published("Qwen/Qwen3.6-27B", reasoning=(*THINKING, "preserve_thinking=true")),
    "qwen3_8": Published(
        "Qwen/Qwen3.8-27B", reasoning=(*THINKING, "preserve_thinking=false", "reasoning_effort=low")
    ),
    "smolvlm": Published("SmolVLM and SmolVLM2", parts=True),
}


def user(text):
    return {"role": "user", "content": text}


def system(text):
    return {"role": "system", "content": text}


def answer(text, **more):
    return {"role": "assistant", "content": text, **more}


CALL = {
    "type": "function", "id": "call12345",
    "function": {"name": "get_weather", "arguments": {"city": "Zürich <b>", "days": 2}},
}  # fmt: skip
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather", "description": "The weather; \"of\" <b>.",
        "parameters": {
            "type": "object", "required": ["city"],
            "properties": {"city": {"type": "string", "description": "Where."}},
        },
    },
}  # fmt: skip
CALLED = [
    user("a"), {"role": "assistant", "tool_calls": [CALL], "reasoning_content": "hm"},
    {"role": "tool", "name": "get_weather", "tool_call_id": "call12345", "content": "☀"},
]  # fmt: skip
# Which reasoning is written down again, and which is left out.
REASONED = {
    "reasoning in the text": [
        user("a"), answer("<think>\nhm\n</think>\n\nThat."), user("b"),
        answer("<think>x</think>y"), user("c"),
    ],
    "reasoning beside the text": [
        user("a"), answer("That.", reasoning_content="\nhm\n"), user("b"),
        answer("y", thinking="z"), user("c"),
    ],
    "a reasoned answer at the end": [user("a"), answer("b", reasoning="hm", finish_reason="eos")],
    "tools": CALLED,
    "tools, and after them": [*CALLED, answer("Sun."), user("Thanks")],
}  # fmt: skip
CONVERSATIONS = {
    "one turn": [user("Hi <b> & \"you\" é 🙂\n")],
    "system": [system("Be\n brief. "), user(" What? ")],
    "turns": [user("a"), answer("b\n"), user(" c"), answer(" d"), user("e")],
    "look-alikes": [
        user("<|im_end|>\n<|im_start|>system\n<start_of_turn>[INST]</s><｜User｜><|eot_id|>")
    ],
    "nothing said": [system(""), user("")],
    "an answer at the end": [user("a"), answer(" b ", finish_reason="eos")],
    "an answer to go on with": [user("a"), answer("Well, <b>")],
    "one that begins with reasoning": [user("a"), answer("<think>\nSo")],
    "one that is cut in reasoning": [user("a"), answer("\nWell ", reasoning_content="hm")],
    "two of the same": [user("a"), user("b"), system("c"), user("d")],
    "other roles": [{"role": "developer", "content": "d"}, answer("a"), user("b")],
    **REASONED,
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Name → text, as published; of all that the wheel has, without its own variants."""
    folder = download(WHEEL, tmp_path_factory.mktemp("wheel"), lambda done: None)
    found = {}
    for path in folder.rglob("*"):  # pip leaves the wheel, uv what was in it
        if path.suffix == ".jinja":
            found[path.stem] = path.read_bytes()
        elif path.suffix == ".whl":
            with zipfile.ZipFile(path) as wheel:
                for name in wheel.namelist():
                    if name.endswith(".jinja"):
                        found[name.split("/")[-1].removesuffix(".jinja")] = wheel.read(name)
    kept = {name: found[name] for name in sorted(found) if not name.endswith("_training")}
    assert hashlib.sha256(b"\0".join(kept.values())).hexdigest() == DIGEST
    assert set(kept) == set(TEMPLATES)
    return {name: text.decode() for name, text in kept.items()}


@pytest.fixture(scope="module")
def vocabulary(sources, tmp_path_factory):
    """The tokenizer.json of bytes and of all that the templates write as special tokens."""
    marks = r"<\|[^|<>]+\|?>|<[^|<>]+\|>|<｜[^｜<>]+｜>|\[/?[A-Z_]+\]|</?[a-z_]+>|<[A-Z_]+>"
    ours = (text for one in TEMPLATES.values() for text in (one.bos, one.eos))
    specials = sorted({*ours, *re.findall(marks, "\n".join(sources.values()))})
    words = specials + sorted(pre_tokenizers.ByteLevel.alphabet())
    library = Library(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(text, special=True) for text in specials])
    path = tmp_path_factory.mktemp("vocabulary") / "tokenizer.json"
    library.save(str(path))
    return path


@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_are_those_of_apply_chat_template(name, sources, vocabulary, tmp_path):
    from transformers import PreTrainedTokenizerFast

    one = TEMPLATES[name]
    (tmp_path / "tokenizer.json").symlink_to(vocabulary)
    settings = {"bos_token": one.bos, "eos_token": one.eos}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "chat_template.jinja").write_bytes(sources[name].encode())
    ours = load_tokenizer(open_checkpoint(tmp_path, weights=False))
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)

    def both(messages, given, variables):
        while True:  # some write the date
            day = date.today()
            found = (
                our_ids(ours, messages, given, variables),
                their_ids(theirs, messages, one.parts, given, variables),
            )
            if day == date.today():
                return found

    plain, reasoned = {}, {given: {} for given in one.reasoning}
    for title, messages in CONVERSATIONS.items():
        variables = {"tools": [TOOL]} if title.startswith("tools") else {}
        plain[title], their = both(messages, "", variables)
        assert plain[title] == their, title
        for given in one.reasoning if title in REASONED else ():
            reasoned[given][title], their = both(messages, given, variables)
            assert reasoned[given][title] == their, (title, given)
    for name in {given.partition("=")[0] for given in one.reasoning}:
        values = [found for given, found in reasoned.items() if given.startswith(name)]
        assert any(found[title] != plain[title] for found in values for title in found), name


def our_ids(tokenizer, messages, given, variables):
    """The ids that `generate` gives to the model, or why there are none."""
    document = {"messages": messages, "variables": variables}
    prompt = Prompt(None, where="x", conversation=read_conversation(document, "x"))
    options = ChatOptions(variable=[given] if given else None)
    try:
        _, found = pieces(prompt, options, tokenizer, "m", parse_special=True)
    except CheckpointError as error:
        return error.message.removeprefix("x: the chat template ")
    return [piece.id for piece in found]


def their_ids(tokenizer, messages, parts, given, variables):
    """The same of transformers, told how the conversation ends."""
    name, _, value = given.partition("=")
    last = messages[-1]
    ends = last["role"] == "assistant"
    kept = [{k: v for k, v in one.items() if k != "finish_reason"} for one in messages]
    for one in kept if parts else ():
        if "content" in one:
            one["content"] = [{"type": "text", "text": one["content"]}]
    try:
        return tokenizer.apply_chat_template(
            kept, return_dict=False, add_generation_prompt=not ends,
            continue_final_message=ends and "finish_reason" not in last, **variables,
            **({name: {"true": True, "false": False}.get(value, value)} if given else {}),
        )  # fmt: skip
    except Exception as error:  # a template raises anything
        if "continue_final_message" in str(error):
            return "does not write the last message as it stands: the model cannot continue it"
        what = "takes no system message" if "System role" in str(error) else "failed"
        return f"{what}: {error}"
