"""LongBench and LongBench-E (arXiv 2308.14508): published prompts, answer lengths and metrics."""

from __future__ import annotations

from typing import NamedTuple

from sekv.evaluation.benchmarks.parts import Parts, Row, cut

REPOSITORY = "THUDM/LongBench"
_PASSAGES = (
    "Answer the question based on the given passages. Only give me the answer and do not output any other words.\n\n"
    "The following are given passages.\n{context}\n\n"
    "Answer the question based on the given passages. Only give me the answer and do not output any other words.\n\n"
    "Question: {input}\nAnswer:"
)
_QASPER = (
    "Answer the question as concisely as you can, using a single phrase or sentence if possible. "
    'If the question cannot be answered based on the information in the article, write "unanswerable". '
    'If the question is a yes/no question, answer "yes", "no", or "unanswerable". Do not provide any explanation.'
)


class Kind(NamedTuple):
    """One data set of LongBench.

    Attributes:
        template: the published prompt.
        max_new_tokens: the published answer length.
        metric: name of the published metric.
        chat: whether the published runs put it into the chat template: not few-shot and code.
        extended: part of LongBench-E.
    """

    template: str
    max_new_tokens: int
    metric: str
    chat: bool = True
    extended: bool = False


KINDS = {
    "narrativeqa": Kind(
        "You are given a story, which can be either a novel or a movie script, and a question. Answer the question as "
        "concisely as you can, using a single phrase if possible. Do not provide any explanation.\n\n"
        "Story: {context}\n\nNow, answer the question based on the story as concisely as you can, using a single "
        "phrase if possible. Do not provide any explanation.\n\nQuestion: {input}\n\nAnswer:",
        128,
        "qa_f1",
    ),
    "qasper": Kind(
        f"You are given a scientific article and a question. {_QASPER}\n\nArticle: {{context}}\n\n "
        + _QASPER.replace("Answer the question as", "Answer the question based on the above article as", 1)
        + "\n\nQuestion: {input}\n\nAnswer:",
        128,
        "qa_f1",
        extended=True,
    ),
    "multifieldqa_en": Kind(
        "Read the following text and answer briefly.\n\n{context}\n\nNow, answer the following question based on the "
        "above text, only give me the answer and do not output any other words.\n\nQuestion: {input}\nAnswer:",
        64,
        "qa_f1",
        extended=True,
    ),
    "multifieldqa_zh": Kind(
        "阅读以下文字并用中文简短回答：\n\n{context}\n\n现在请基于上面的文章回答下面的问题，只告诉我答案，"  # noqa: RUF001
        "不要输出任何其他字词。\n\n问题：{input}\n回答：",  # noqa: RUF001
        64,
        "qa_f1_zh",
    ),
    "hotpotqa": Kind(_PASSAGES, 32, "qa_f1", extended=True),
    "2wikimqa": Kind(_PASSAGES, 32, "qa_f1", extended=True),
    "musique": Kind(_PASSAGES, 32, "qa_f1"),
    "dureader": Kind(
        "请基于给定的文章回答下述问题。\n\n文章：{context}\n\n请基于上述文章回答下面的问题。\n\n问题：{input}\n回答：",  # noqa: RUF001
        128,
        "rouge_l_zh",
    ),
    "gov_report": Kind(
        "You are given a report by a government agency. Write a one-page summary of the report.\n\nReport:\n{context}"
        "\n\nNow, write a one-page summary of the report.\n\nSummary:",
        512,
        "rouge_l",
        extended=True,
    ),
    "qmsum": Kind(
        "You are given a meeting transcript and a query containing a question or instruction. Answer the query in one "
        "or more sentences.\n\nTranscript:\n{context}\n\nNow, answer the query based on the above meeting transcript "
        "in one or more sentences.\n\nQuery: {input}\nAnswer:",
        512,
        "rouge_l",
    ),
    "multi_news": Kind(
        "You are given several news passages. Write a one-page summary of all news. \n\nNews:\n{context}\n\nNow, write "
        "a one-page summary of all the news.\n\nSummary:",
        512,
        "rouge_l",
        extended=True,
    ),
    "vcsum": Kind(
        "下面有一段会议记录，请你阅读后，写一段总结，总结会议的内容。\n会议记录：\n{context}\n\n会议总结：",  # noqa: RUF001
        512,
        "rouge_l_zh",
    ),
    "trec": Kind(
        "Please determine the type of the question below. Here are some examples of questions.\n\n{context}\n{input}",
        64,
        "classification",
        chat=False,
        extended=True,
    ),
    "triviaqa": Kind(
        "Answer the question based on the given passage. Only give me the answer and do not output any other words. "
        "The following are some examples.\n\n{context}\n\n{input}",
        32,
        "qa_f1_line",
        chat=False,
        extended=True,
    ),
    "samsum": Kind(
        "Summarize the dialogue into a few short sentences. The following are some examples.\n\n{context}\n\n{input}",
        128,
        "rouge_l_line",
        chat=False,
        extended=True,
    ),
    "lsht": Kind("请判断给定新闻的类别，下面是一些例子。\n\n{context}\n{input}", 64, "classification", chat=False),  # noqa: RUF001
    "passage_count": Kind(
        "There are some paragraphs below sourced from Wikipedia. Some of them may be duplicates. Please carefully read "
        "these paragraphs and determine how many unique paragraphs there are after removing duplicates. In other "
        "words, how many non-repeating paragraphs are there in total?\n\n{context}\n\nPlease enter the final count of "
        "unique paragraphs after removing duplicates. The output format should only contain the number, such as 1, 2, "
        "3, and so on.\n\nThe final answer is: ",
        32,
        "count",
        extended=True,
    ),
    "passage_retrieval_en": Kind(
        "Here are 30 paragraphs from Wikipedia, along with an abstract. Please determine which paragraph the abstract "
        "is from.\n\n{context}\n\nThe following is an abstract.\n\n{input}\n\nPlease enter the number of the paragraph "
        'that the abstract is from. The answer format must be like "Paragraph 1", "Paragraph 2", etc.\n\n'
        "The answer is: ",
        32,
        "retrieval",
        extended=True,
    ),
    "passage_retrieval_zh": Kind(
        "以下是若干段落文字，以及其中一个段落的摘要。请确定给定的摘要出自哪一段。\n\n{context}\n\n下面是一个摘要\n\n{input}"  # noqa: RUF001
        '\n\n请输入摘要所属段落的编号。答案格式必须是"段落1"，"段落2"等格式\n\n答案是：',  # noqa: RUF001
        32,
        "retrieval",
    ),
    "lcc": Kind(
        "Please complete the code given below. \n{context}Next line of code:\n", 64, "code", chat=False, extended=True
    ),
    "repobench-p": Kind(
        "Please complete the code given below. \n{context}{input}Next line of code:\n",
        64,
        "code",
        chat=False,
        extended=True,
    ),
}


def parts(name: str, row: Row) -> Parts:
    """The texts of one row of the published schema: context, input, answers, all_classes, length."""
    context, after = cut(KINDS[name].template, context=row["context"], input=row["input"])
    return Parts(context, after, tuple(row["answers"]), tuple(row.get("all_classes") or ()))


def extended_parts(name: str, row: Row) -> Parts:
    """As `parts`, grouped by the published length classes of LongBench-E."""
    length = int(row["length"])
    return parts(name, row)._replace(group="0-4k" if length < 4000 else "4-8k" if length < 8000 else "8k+")
