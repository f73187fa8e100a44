"""README's "Verified on" is what the receipts in `tests/receipts` say."""

import json
import re
from pathlib import Path

import pytest

from llmcli.commands.selftest.report import Receipt

ROOT = Path(__file__).parents[2]
RECEIPTS = sorted((ROOT / "tests" / "receipts").glob("*.json"))
HEAD = (
    "| machine | PyTorch | checks | 1B decode | 1B prefill | 8B decode | receipt |\n"
    "|---|---|---|---|---|---|---|\n"
)


def row(file):
    """One receipt as a row of the table."""
    document = json.loads(file.read_text(encoding="utf-8"))
    machine = document["environment"]
    rates = {(rate["shape"], rate["phase"]): rate for rate in document["rates"]}

    def rate(shape, phase):
        one = rates.get((shape, phase))
        return "–" if one is None else f"{one['tokens_per_s']:.3g} tok/s ({one['share']:.0%})"

    passed = [check["ok"] for check in document["checks"].values()]
    name = next(iter(machine["gpus"]), machine["processor"])
    cells = (
        f"{document['device']}: {name}, {machine['cores']} cores", machine["torch"],
        f"{sum(passed)} of {len(passed)}", rate("1B", "decode"), rate("1B", "prefill"),
        rate("8B", "decode"), f"`tests/receipts/{file.name}`",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |\n"


def table():
    """README's table: a row for each receipt, and one that says that no card was there."""
    rows = [row(file) for file in RECEIPTS]
    if not any(json.loads(file.read_text())["device"].startswith("cuda") for file in RECEIPTS):
        rows.append("| CUDA | | none yet | – | – | – | – |\n")
    return HEAD + "".join(rows)


def test_readme_has_the_receipts():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(r"\| machine \|.*?(?=\n\n)", text, re.DOTALL)
    assert found is not None
    assert found[0] + "\n" == table()


@pytest.mark.parametrize("file", RECEIPTS, ids=lambda file: file.name)
def test_a_receipt_can_be_verified_and_passed(file):
    receipt = Receipt.of(json.loads(file.read_text(encoding="utf-8")))
    assert receipt.passed
    assert all(receipt.passed.values())
    assert ("1B", "decode") in receipt.rates
