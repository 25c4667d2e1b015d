from __future__ import annotations

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from sekv.errors import DataError
from sekv.prompt import Prompt, split_prompt

CONTEXT, QUESTION, PREFIX = "The cat sat.\nThe dog ran.", "Who sat?", "It was the"


def chat_text(tokenizer: PreTrainedTokenizerFast, content: str) -> str:
    message = [{"role": "user", "content": content}]
    return str(tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True))


def plain_tokenizer(tokenizer: PreTrainedTokenizerFast, add_bos: bool) -> PreTrainedTokenizerFast:
    plain = copy.deepcopy(tokenizer)
    plain.chat_template = None
    if add_bos:
        plain._tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", plain.bos_token_id)]
        )
    return plain


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """Puts a space before every text it is given, as Llama 2 and Mistral do."""
    letters = [chr(i) for i in range(33, 127)] + ["▁", "\n"]
    vocab = {token: i for i, token in enumerate(["<unk>", "<bos>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always", split=False)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", unk_token="<unk>")
    fast.chat_template = "{% for m in messages %}Q: {{ m['content'] }}\nA: {% endfor %}"
    return fast


@pytest.mark.parametrize("question", [QUESTION, ""])
@pytest.mark.parametrize("prefix", [PREFIX, ""])
def test_the_two_parts_decode_to_the_template_text_applied_once(tokenizer, question: str, prefix: str) -> None:
    prompt = split_prompt(tokenizer, CONTEXT, question, prefix)
    text = chat_text(tokenizer, f"{CONTEXT}\n{question}") + prefix
    assert tokenizer.decode(prompt.ids) == text
    assert text.count("[user]") == text.count("<bos>") == 1
    assert tokenizer.decode(prompt.context_ids).endswith(CONTEXT)
    assert prompt.ids == tokenizer(text, add_special_tokens=False).input_ids
    assert prompt.ids.count(tokenizer.bos_token_id) == 1


def test_context_ids_do_not_depend_on_the_question(tokenizer) -> None:
    first, second = (split_prompt(tokenizer, CONTEXT, question, PREFIX) for question in ("A?", "A longer one?"))
    assert first.context_ids == second.context_ids
    assert first.question_ids != second.question_ids


@given(context=st.text(min_size=1).filter(str.strip), question=st.text())
def test_any_text_survives(tokenizer, context: str, question: str) -> None:
    context, question = (text.encode("utf-8", "ignore").decode() for text in (context + "x", question))
    prompt = split_prompt(tokenizer, context, question)
    assert prompt.ids == tokenizer(chat_text(tokenizer, f"{context}\n{question}"), add_special_tokens=False).input_ids


def test_a_context_that_holds_the_sentinel_is_read_like_any_other(tokenizer) -> None:
    context = "<sekv-end-of-context-0> and <sekv-end-of-context-1>"
    prompt = split_prompt(tokenizer, context, QUESTION)
    assert tokenizer.decode(prompt.context_ids).endswith(context)


@pytest.mark.parametrize("add_bos", [True, False])
def test_without_a_chat_template_the_text_is_plain_behind_the_tokenizers_own_bos(tokenizer, add_bos: bool) -> None:
    plain = plain_tokenizer(tokenizer, add_bos)
    prompt = split_prompt(plain, CONTEXT, QUESTION, PREFIX)
    assert plain.decode(prompt.ids) == f"{'<bos>' * add_bos}{CONTEXT}\n{QUESTION}\n{PREFIX}"
    assert prompt == split_prompt(
        plain_tokenizer(tokenizer, add_bos), CONTEXT, QUESTION, PREFIX, use_chat_template=False
    )
    assert plain.decode(split_prompt(plain, CONTEXT, QUESTION).question_ids) == f"\n{QUESTION}"


def test_no_space_slips_between_the_parts_of_a_sentencepiece_prompt() -> None:
    tokenizer = sentencepiece_tokenizer()
    prompt = split_prompt(tokenizer, CONTEXT, QUESTION, PREFIX)
    text = chat_text(tokenizer, f"{CONTEXT}\n{QUESTION}") + PREFIX
    assert prompt.ids == tokenizer(text, add_special_tokens=False).input_ids


@pytest.mark.parametrize("context", ["", "  \n\t"])
def test_an_empty_context_is_refused(tokenizer, context: str) -> None:
    with pytest.raises(DataError, match="context is empty"):
        split_prompt(tokenizer, context, QUESTION)


def test_a_backbone_without_tokenizer_is_refused() -> None:
    with pytest.raises(DataError, match="no tokenizer"):
        split_prompt(None, CONTEXT, QUESTION)


@pytest.mark.parametrize("template", ["nothing", "{{ messages[0]['content'] }}{{ messages[0]['content'] }}"])
def test_a_template_that_drops_or_repeats_the_message_is_refused(tokenizer, template: str) -> None:
    broken = copy.deepcopy(tokenizer)
    broken.chat_template = template
    with pytest.raises(DataError, match="exactly once"):
        split_prompt(broken, CONTEXT, QUESTION)


@given(context=st.integers(1, 60), question=st.integers(1, 10), new=st.integers(1, 10), positions=st.integers(21, 60))
def test_fitting_takes_ids_out_of_the_middle_and_nothing_else(context: int, question: int, new: int, positions: int):
    prompt = Prompt(list(range(context)), list(range(100, 100 + question)))
    fitted = prompt.fit(positions, new)
    kept = fitted.context_ids
    assert len(fitted.ids) + new <= positions or fitted.truncated == 0
    assert len(fitted.ids) + new == positions or fitted == prompt
    assert fitted.question_ids == prompt.question_ids
    assert len(kept) + fitted.truncated == context
    head = len(kept) - len(kept) // 2
    assert kept == prompt.context_ids[:head] + prompt.context_ids[context - len(kept) // 2 :]


def test_a_question_that_leaves_no_room_is_refused() -> None:
    with pytest.raises(DataError, match="no room for the context in 12 positions"):
        Prompt([1, 2, 3], [4] * 8).fit(12, 4)
