"""The encoding of a conversation, in which answers keep their ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from llmcli.records.text import Finish, Message
from llmcli.text.tokenizer import Tokenizer


class AnswerIds:
    """Encodes conversations without re-encoding the answers, which may end with `eos_ids`."""

    def __init__(self, tokenizer: Tokenizer, eos_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._eos_ids = eos_ids

    def checked(self, message: Message) -> Message:
        """The message, without ids (and their lead) that do not match its text."""
        ids = self.own(message.ids, message.written, message.finish_reason)
        return replace(message, ids=ids, lead=message.lead if ids else "")

    def own(self, ids: Sequence[int], text: str, end: Finish | None) -> tuple[int, ...]:
        """An answer's ids if they match its text and end token; else empty."""
        own, last = (ids[:-1], ids[-1:]) if end == "eos" else (ids, ())
        special = self._tokenizer.hidden_ids.intersection(own)
        ended = end not in (None, "stop") and self._eos_ids.issuperset(last)
        whole = self._tokenizer.decode(own, markers=True) == text
        return tuple(ids) if ended and whole and not special else ()

    def encoded(self, messages: Sequence[Message], text: str) -> list[int]:
        """Ids of the template's text for the messages."""
        ids: list[int] = []
        done = 0  # characters covered by the ids
        last = ids, done  # state before the last answer
        for one in messages:
            # the template writes the text of the end token after the answer
            end = one.ids[-1:] if one.finish_reason == "eos" else ()
            own = one.lead + one.written + self._tokenizer.decode(end, skip_special=False)
            # the lead of a short turn begins in the answer before
            found = text.find(own, max(0, done - len(one.lead))) if one.ids and one.lead else -1
            if found < 0:
                continue
            between = self._behind(ids, text[done : found + len(one.lead)])
            if between is None:
                break
            last = ids, done
            ids = [*ids, *between, *one.ids]
            done = found + len(own)
        rest = self._behind(ids, text[done:])
        if rest is None:  # unclear end of the last answer: re-encode it
            ids, done = last
            rest = self._behind(ids, text[done:])
        return self._behind([], text) or [] if rest is None else ids + rest

    def _behind(self, ids: list[int], text: str) -> list[int] | None:
        """Ids of a text after other ids; None if they depend on those.

        Tokens never merge across a special token on either side of the border.
        """
        if not ids:
            return self._tokenizer.encode(text, add_bos=self._tokenizer.before_chat(text))
        special = self._tokenizer.special_ids
        if ids[-1] in special:
            lead = self._tokenizer.decode(ids[-1:], skip_special=False)
            found = self._tokenizer.encode(lead + text, add_bos=False)
            return found[1:] if found[:1] == ids[-1:] else None
        found = self._tokenizer.encode(text, add_bos=False)
        return found if not found or found[0] in special else None
