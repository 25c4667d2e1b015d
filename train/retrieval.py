"""Synthetic retrieval documents: facts hidden in real text, and a conversation that asks for them.

Ordinary text seldom makes a model look far back, so routers see few examples of what they are for. These documents are
made of held-in text with short facts between its sentences; the query window asks for some of the facts, turn by turn.
Names are made of syllables and values of random digits, letters and words: nothing is taken from a benchmark.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from sekv.prompt import split_prompt

_CONSONANTS = [
    "b",
    "c",
    "d",
    "f",
    "g",
    "h",
    "j",
    "k",
    "l",
    "m",
    "n",
    "p",
    "r",
    "s",
    "t",
    "v",
    "w",
    "z",
    "br",
    "dr",
    "gr",
    "kl",
    "st",
    "tr",
]
_VOWELS = ["a", "e", "i", "o", "u", "ai", "ea", "io", "ou"]
_DIGITS = (2, 3, 4, 5, 6, 8, 9)
_FACTS_PER_TOKENS = 300  # one fact for so many tokens of text, on average


@dataclass(frozen=True)
class Fact:
    """One retrievable fact.

    Attributes:
        text: how it stands in the document.
        question: what asks for it.
        prefix: the beginning of the answer.
        answer: what completes it.
    """

    text: str
    question: str
    prefix: str
    answer: str


@dataclass(frozen=True)
class RetrievalDocument:
    """A document that asks for what it hides.

    Attributes:
        context_ids: the text with its facts, the head of the chat template included.
        window_ids: questions and answers in turn, the tail of the chat template included.
    """

    context_ids: list[int]
    window_ids: list[int]


def _name(rng: random.Random) -> str:
    return "".join(rng.choice(_CONSONANTS) + rng.choice(_VOWELS) for _ in range(rng.randint(2, 3))).capitalize()


def _number(rng: random.Random) -> str:
    length = rng.choice(_DIGITS)
    return str(rng.randint(10 ** (length - 1), 10**length - 1))


def _code(rng: random.Random) -> str:
    letters = "".join(rng.choices("ABCDEFGHJKLMNPQRSTUVWXYZ", k=rng.randint(1, 3)))
    return f"{letters}-{rng.randint(10, 9999)}"


def _hex(rng: random.Random) -> str:
    length = rng.choice((4, 5, 6))
    return f"{rng.getrandbits(4 * length):0{length}x}"


def _value(rng: random.Random) -> str:
    return rng.choice((_number, _number, _number, _code, _hex, _name))(rng)


def _door(rng: random.Random) -> Fact:
    owner, value = _name(rng), _value(rng)
    return Fact(
        f"To open the door of {owner}'s workshop, type {value}.",
        f"What has to be typed to open the door of {owner}'s workshop?",
        f"To open the door of {owner}'s workshop, type",
        value,
    )


def _phone(rng: random.Random) -> Fact:
    owner, value = _name(rng), _number(rng)
    return Fact(
        f"You can reach {owner} under extension {value} until noon.",
        f"Under which extension can {owner} be reached?",
        f"{owner} can be reached under extension",
        value,
    )


def _parcel(rng: random.Random) -> Fact:
    parcel, shelf = _code(rng), _value(rng)
    return Fact(
        f"Parcel {parcel} was put on shelf {shelf} yesterday.",
        f"On which shelf is parcel {parcel}?",
        f"Parcel {parcel} is on shelf",
        shelf,
    )


def _weight(rng: random.Random) -> Fact:
    thing, value = _name(rng), _number(rng)
    return Fact(
        f"The statue called {thing} weighs exactly {value} kilograms.",
        f"How many kilograms does the statue called {thing} weigh?",
        f"The statue called {thing} weighs",
        value,
    )


def _assignment(rng: random.Random) -> Fact:
    name, value = f"{_name(rng).lower()}_{rng.choice(('limit', 'port', 'seed', 'offset'))}", _number(rng)
    return Fact(f"{name} = {value}", f"To what does the text set `{name}`?", f"The text has {name} =", value)


def _record(rng: random.Random) -> Fact:
    key, owner, value = _hex(rng), _name(rng), _number(rng)
    return Fact(
        f'{{"id": "{key}", "owner": "{owner}", "balance": {value}}}',
        f'What is the balance of the record with the id "{key}"?',
        f'The record with the id "{key}" has "balance":',
        value,
    )


def _owner(rng: random.Random) -> Fact:
    boat, owner = _name(rng), _name(rng)
    return Fact(
        f"The boat {boat} has belonged to {owner} for years.",
        f"To whom does the boat {boat} belong?",
        f"The boat {boat} belongs to",
        owner,
    )


def _train(rng: random.Random) -> Fact:
    town, time = _name(rng), f"{rng.randint(0, 23)}:{rng.randint(10, 59)}"
    return Fact(
        f"The last train to {town} leaves at {time}.",
        f"When does the last train to {town} leave?",
        f"The last train to {town} leaves at",
        time,
    )


def _password(rng: random.Random) -> Fact:
    site, value = _name(rng), _value(rng)
    return Fact(
        f"(Note to self: the login for {site} is {value}, do not forget it.)",
        f"What is the login for {site}?",
        f"The login for {site} is",
        value,
    )


def _room(rng: random.Random) -> Fact:
    person, room = _name(rng), _number(rng)
    return Fact(
        f"Dr. {person} has moved to room {room} this week.",
        f"To which room has Dr. {person} moved?",
        f"Dr. {person} has moved to room",
        room,
    )


def _invoice(rng: random.Random) -> Fact:
    invoice, amount = _code(rng), _number(rng)
    return Fact(
        f"Invoice {invoice}: {amount} euros, unpaid.",
        f"How much is invoice {invoice}?",
        f"Invoice {invoice} amounts to",
        amount,
    )


def _colour(rng: random.Random) -> Fact:
    model, value = _name(rng), _value(rng)
    return Fact(
        f"| {model} | {value} | in stock |",
        f"Which entry stands beside {model} in the table?",
        f"Beside {model} stands",
        value,
    )


FACTS: tuple[Callable[[random.Random], Fact], ...] = (
    _door,
    _phone,
    _parcel,
    _weight,
    _assignment,
    _record,
    _owner,
    _train,
    _password,
    _room,
    _invoice,
    _colour,
)


def retrieval_sequence(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], rng: random.Random, smallest: int, limit: int
) -> tuple[list[int], int]:
    """A retrieval document made of a training sequence, shortened at random so that lengths vary.

    Args:
        tokenizer: the backbone's.
        ids: token ids of real text.
        rng: source of everything random.
        smallest: tokens that are left of the sequence, at least, if it has them; facts come on top.
        limit: most tokens in all; the beginning of the text gives way.

    Returns:
        Token ids of context and window, and the tokens of the window.
    """
    kept = list(ids)[: max(smallest, int(len(ids) * rng.uniform(0.4, 1.0)))]
    document = make_document(tokenizer, str(tokenizer.decode(kept)), rng)
    return [*document.context_ids, *document.window_ids][-limit:], len(document.window_ids)


def make_document(
    tokenizer: PreTrainedTokenizerBase, text: str, rng: random.Random, questions: int = 4
) -> RetrievalDocument:
    """Hides facts in a text and asks for some of them.

    Args:
        tokenizer: the backbone's.
        text: real text; it decides the length of the document.
        rng: source of names, values and places.
        questions: turns of the conversation behind the text.
    """
    pieces = re.split(r"(?<=[.!?:])\s+|\n\n", text)
    one_kind = rng.choice(FACTS) if rng.random() < 0.5 else None  # many facts of one form are told apart by the name
    count = max(questions, len(text) // (4 * _FACTS_PER_TOKENS))
    by_question: dict[str, Fact] = {}  # two facts that answer one question would contradict each other
    while len(by_question) < count:
        fact = (one_kind or rng.choice(FACTS))(rng)
        by_question.setdefault(fact.question, fact)
    facts = list(by_question.values())
    for fact in facts:
        pieces.insert(rng.randrange(len(pieces) + 1), fact.text)
    asked = rng.sample(facts, questions)
    prompt = split_prompt(tokenizer, _join(pieces, rng), asked[0].question, asked[0].prefix)
    window = prompt.question_ids + _encode(tokenizer, f" {asked[0].answer}.")
    for fact in asked[1:]:
        window += _turn(tokenizer, fact)
    return RetrievalDocument(prompt.context_ids, window)


def _join(pieces: Sequence[str], rng: random.Random) -> str:
    return "".join(piece + ("\n" if rng.random() < 0.2 else " ") for piece in pieces).strip()


def _turn(tokenizer: PreTrainedTokenizerBase, fact: Fact) -> list[int]:
    if not tokenizer.chat_template:
        return _encode(tokenizer, f"\n{fact.question}\n{fact.prefix} {fact.answer}.")
    messages = [{"role": "user", "content": "A"}, {"role": "assistant", "content": "B"}]
    head = str(tokenizer.apply_chat_template(messages, tokenize=False))
    both = [*messages, {"role": "user", "content": fact.question}]
    text = str(tokenizer.apply_chat_template(both, tokenize=False, add_generation_prompt=True))
    closing = head[head.rindex("B") + 1 :]
    return _encode(tokenizer, f"{closing}{text[len(head) :]}{fact.prefix} {fact.answer}.")


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False).input_ids
