"""Other names for what `numbers` has."""

from llmcli.ui.numbers import digits_for as digits_for
from llmcli.ui.numbers import milliseconds as milliseconds
from llmcli.ui.numbers import percent as percent
from llmcli.ui.numbers import rate as rate
from llmcli.ui.numbers import scaled as scaled
from llmcli.ui.numbers import signed_percent as signed_percent
from llmcli.ui.numbers import speed as speed
from llmcli.ui.numbers import unit as unit
