"""Time and memory of all head metrics of one recurrent layer against the length of the prompt.

    python tests/benchmarks/linear_maps.py [--mixer ssm] [--lengths 1024,2048] [--heads 4] [--json]

A gated DeltaNet with heads as in Qwen3-Next (keys and values of 128 numbers), or Mamba-2 with
states of 128 × 64, random weights, float32, a fresh process for each length. Memory is the most
that the process held, above what it held with the model loaded; beside it what the layer's maps
would take as a whole.
"""

from __future__ import annotations

from attention_length import LENGTHS, measured, show
from bench_tools import arguments

LIMIT = 3 << 30  # bytes above the model, at every length
MIXERS = {
    "delta": "DeltaConfig(heads={heads}, key_heads={heads}, key_dim=128, value_dim=128, length=4, "
    "norm=norm)",
    "ssm": "SsmConfig(heads={heads}, head_dim=64, groups=1, state=128, length=4, norm=norm)",
}
PREFIX = {"delta": "linattn", "ssm": "ssm"}
# half-lives from a few tokens to thousands, as trained models have them
RATES = """
rates = decoder.weight("blocks.0.{prefix}.A_log").dense()
rates.copy_(torch.linspace(-8.0, 0.0, len(rates)))
"""


def main() -> None:
    parser = arguments(__doc__, heads=4, lengths=LENGTHS, threads=2)
    parser.add_argument("--mixer", choices=tuple(MIXERS), default="delta")
    options = parser.parse_args()
    mixer = MIXERS[options.mixer].format(heads=options.heads)
    rates = RATES.format(prefix=PREFIX[options.mixer])
    lengths = map(int, options.lengths.split(","))
    found = [measured(mixer, options.heads, length, options.threads, rates) for length in lengths]
    title = f"{options.mixer} layer, {options.heads} heads"
    show(title, found, LIMIT, options.threads, options.json)


if __name__ == "__main__":
    main()
