"""A question about a context as token ids: the part that is compressed, and the part that is asked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import count

from transformers import PreTrainedTokenizerBase

from sekv.errors import DataError

_ANCHOR = "a"


@dataclass(frozen=True)
class Prompt:
    """A prompt in two parts; read one after the other they are the plain prompt.

    Attributes:
        context_ids: everything up to the end of the context, the head of the chat template included.
        question_ids: the question, the tail of the chat template, and the beginning of the answer; never empty.
        truncated: tokens taken out of the middle of the context to fit the backbone.
    """

    context_ids: list[int]
    question_ids: list[int]
    truncated: int = 0

    @property
    def ids(self) -> list[int]:
        """The whole prompt."""
        return self.context_ids + self.question_ids

    def fit(self, max_positions: int, max_new_tokens: int) -> Prompt:
        """The prompt that leaves room for the answer: ids leave the middle of the context, text is never re-encoded.

        Raises:
            DataError: question and answer alone fill the backbone's positions.
        """
        room = max_positions - len(self.question_ids) - max_new_tokens
        if room < 1:
            raise DataError(
                f"a question of {len(self.question_ids)} tokens and an answer of {max_new_tokens} leave no room for "
                f"the context in {max_positions} positions; ask a shorter question or fewer new tokens"
            )
        excess = len(self.context_ids) - room
        if excess <= 0:
            return self
        head = room - room // 2
        kept = self.context_ids[:head] + self.context_ids[head + excess :]
        return replace(self, context_ids=kept, truncated=self.truncated + excess)


def split_prompt(
    tokenizer: PreTrainedTokenizerBase | None,
    context: str,
    question: str,
    answer_prefix: str = "",
    use_chat_template: bool = True,
    separator: str = "\n",
) -> Prompt:
    """Applies the chat template once to `context + separator + question`, then splits the text behind the context.

    The two parts are encoded apart, so the context's ids do not depend on the question; decoded one after the other
    they give the template's text followed by `answer_prefix`.

    Args:
        tokenizer: the backbone's tokenizer; one without a chat template gets plain text after its own BOS.
        context: the text to compress.
        question: what is asked about it; may be empty.
        answer_prefix: the beginning of the answer, which the model continues.
        use_chat_template: False gives plain text under any tokenizer.
        separator: text between context and question.

    Raises:
        DataError: no tokenizer, an empty context, or a chat template that does not show the user's text exactly once.
    """
    if tokenizer is None:
        raise DataError("the backbone has no tokenizer, so text cannot be read; add tokenizer.json to its folder")
    if not context.strip():
        raise DataError("the context is empty; give the text that the question is about")
    if not (use_chat_template and tokenizer.chat_template):
        ending = f"\n{answer_prefix}" if answer_prefix else ""
        head = _leading_bos(tokenizer) + _encode(tokenizer, context)
        return Prompt(head, _encode_continuation(tokenizer, f"{separator}{question}{ending}"))
    sentinel = _sentinel(context + question)
    head_text, tail_text = _around_user_text(tokenizer, f"{context}{sentinel}{separator}{question}", sentinel)
    return Prompt(_encode(tokenizer, head_text), _encode_continuation(tokenizer, tail_text + answer_prefix))


def template_parts(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Token ids that the chat template puts before and after a user's text.

    A tokenizer without a template puts its BOS before and a newline after.

    Raises:
        DataError: the template does not show the user's text exactly once.
    """
    if not tokenizer.chat_template:
        return _leading_bos(tokenizer), _encode(tokenizer, "\n")
    sentinel = _sentinel("")
    head, tail = _around_user_text(tokenizer, sentinel, sentinel)
    return _encode(tokenizer, head), _encode(tokenizer, tail)


def _around_user_text(tokenizer: PreTrainedTokenizerBase, text: str, sentinel: str) -> tuple[str, str]:
    """The chat prompt of a user's text, split at the sentinel in it."""
    message = {"role": "user", "content": text}
    shown = str(tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True))
    if shown.count(sentinel) != 1:
        raise DataError(
            "the tokenizer's chat template does not show the user's message exactly once; repair the template"
        )
    head, tail = shown.split(sentinel)
    return head, tail


def _sentinel(text: str) -> str:
    candidates = (f"<sekv-end-of-context-{i}>" for i in count())
    return next(candidate for candidate in candidates if candidate not in text)


def _leading_bos(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    ids = tokenizer("").input_ids
    return ids[:1] if ids and ids[0] == tokenizer.bos_token_id else []


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    # A template's text already holds its special tokens. No warning about long texts: `fit` shortens them.
    return tokenizer(text, add_special_tokens=False, verbose=False).input_ids


def _encode_continuation(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    # SentencePiece tokenizers put a space before the text they are given; behind an anchor they do not.
    anchor = _encode(tokenizer, _ANCHOR)
    ids = _encode(tokenizer, _ANCHOR + text)
    return ids[len(anchor) :] if ids[: len(anchor)] == anchor else _encode(tokenizer, text)
