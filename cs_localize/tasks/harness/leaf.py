"""One task of lm-eval: its questions as items, and answers graded by its own filters and metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from cs_localize.errors import UsageError, one_line
from cs_localize.outcomes import Item, Outcome
from cs_localize.tasks.harness.metrics import choose_metric
from cs_localize.tasks.task import Record

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask

_SHOT_SEED = 1234  # lm-eval's own
_MOST_GENERATED = 256  # tokens, as lm-eval's hf and vllm models do where a task names no limit


class Chat(Protocol):
    """Writes a conversation as a model's chat template does."""

    def __call__(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of messages with ``role`` and ``content``."""
        ...


class Unaskable(Exception):
    """Why a question cannot be asked."""


class Leaf:
    """A loaded lm-eval task with one fixed set of few-shot examples.

    Args:
        name: the task's name.
        task: the task.
        metric: the metric that decides, with or without its filter; None for the usual one.
        num_fewshot: number of examples; None for the task's own.
        system: what the model is told before everything else.
        chat: writes prompts as conversations; None for plain text.
        multiturn: whether examples are turns of the conversation, or part of one message.

    Attributes:
        name: the task's name.
        metric: the metric and filter that decide.
        kind: lm-eval's ``output_type``.
        source: what the questions are read from; equal sources have equal questions.

    Raises:
        UsageError: if the task does not offer the metric, or has too few examples.
    """

    def __init__(
        self,
        name: str,
        task: ConfigurableTask,
        metric: str | None = None,
        num_fewshot: int | None = None,
        system: str | None = None,
        chat: Chat | None = None,
        multiturn: bool = False,
    ) -> None:
        self.name = name
        self.kind: str = task.OUTPUT_TYPE
        self.source = str((task.config.dataset_path, task.config.dataset_name, task.config.dataset_kwargs))
        self._task = task
        self._system = system
        self._chat = chat
        self._multiturn = multiturn
        task._metric_fn_list.pop("acc_mutual_info", None)  # it would ask every choice once more, without the question
        self._shots = self._fix_shots(num_fewshot)
        self.metric = choose_metric(name, self._offered(), metric)

    @cached_property
    def texts(self) -> dict[int, str]:
        """The question of every document, by the document's number; those of the few-shot examples are left out."""
        shown = {self._text(shot, self._task.fewshot_cfg.doc_to_text) for shot in self._shots}
        texts = {number: self._text(doc) for number, doc in enumerate(self._task.task_docs)}
        return {number: text for number, text in texts.items() if text not in shown}

    def item(self, task: str, question: str, number: int) -> Item:
        """A document as an engine is asked it.

        Args:
            task: name of the task that will own the item.
            question: the item's id.
            number: the document's.

        Raises:
            Unaskable: if its answer is not among its choices, or no choice is wrong.
        """
        doc = self._task.task_docs[number]
        requests = self._requests(doc, number)
        if self.kind == "generate_until":
            prompt, options = requests[0].args
            answer = self._delimiter(prompt) + self._reference(doc)
            stop, limit = _ends(options)
            return Item(task, question, prompt, answer, stop=stop, max_tokens=limit, boundary="lm-eval")
        pairs = tuple(request.args for request in requests)
        if self.kind == "loglikelihood":
            return Item(task, question, pairs[0][0], pairs[0][1], max_tokens=0, boundary="lm-eval")
        gold = self._gold(doc, len(pairs))
        if len(gold) == len(pairs):
            raise Unaskable("a question without a wrong choice")
        prompt, answer = pairs[gold[0]]
        return Item(task, question, prompt, answer, choices=pairs, gold=gold, max_tokens=0, boundary="lm-eval")

    def right(self, number: int, parts: Sequence[Outcome]) -> bool:
        """Whether lm-eval's filters and metric find the answer to a document right.

        Raises:
            UsageError: if the metric is no matter of right and wrong.
        """
        value = self._values(self._task.task_docs[number], self._responses(parts), self.metric)
        if not _decides(value):
            raise UsageError(
                f"task '{self.name}': document {number} has the metric '{self.metric}' {one_line(value, 40)}, which is "
                "neither right (1) nor wrong (0); choose another with lm_eval.metric"
            )
        return bool(value)

    def record(self, item: Item, number: int, outcome: Outcome) -> Record:
        """A document and its graded answer as lm-eval records them; see ``Capability.record``."""
        doc = self._task.task_docs[number]
        options = {"until": list(item.stop), "max_gen_toks": item.max_tokens}
        asked = options if self.kind == "generate_until" else item.answer
        responses = self._responses(outcome.parts or [outcome])
        name, _, filtered_by = self.metric.partition(",")
        return Record(
            task=self.name,
            version=self._task.VERSION,
            shots=int(self._task.config.num_fewshot or 0),
            doc=doc,
            target=self._task.doc_to_target(doc),
            arguments=item.choices or [(item.prompt, asked)],
            responses=responses,
            filtered=self._filtered(doc, responses, filtered_by),
            filter=filtered_by,
            metrics={name: float(outcome.correct)},
        )

    def _responses(self, parts: Sequence[Outcome]) -> list[Any]:
        generated = self.kind == "generate_until"
        return [part.text if generated else (part.score, part.correct) for part in parts]

    def _fix_shots(self, wanted: int | None) -> list[Any]:
        """Draws the examples once. lm-eval would draw others for every document, some of them documents to be asked."""
        from lm_eval.api.samplers import FirstNSampler

        count = wanted if wanted is not None else self._task.config.num_fewshot or 0
        if count < 0:
            raise UsageError(f"task '{self.name}' cannot show {count} examples")
        self._task.set_config("num_fewshot", count)
        if not count:
            return []
        self._task.set_fewshot_seed(_SHOT_SEED)
        try:
            shots = list(self._task.sampler.sample(n=count))
        except (AttributeError, AssertionError, ValueError) as error:
            raise UsageError(f"task '{self.name}' cannot show {count} examples: {one_line(error)}") from None
        self._task.sampler = FirstNSampler(shots)
        return shots

    def _text(self, doc: Mapping[str, Any], template: object = None) -> str:
        text = self._task.doc_to_text(doc, template)
        return text if isinstance(text, str) else "\n".join(self._task.doc_to_choice(doc))

    def _requests(self, doc: Mapping[str, Any], number: int) -> list[Any]:
        """lm-eval's requests for a document, made as ``Task.build_all_requests`` makes them."""
        chat = {"apply_chat_template": self._chat is not None, "chat_template": self._chat}
        context = self._task.fewshot_context(
            doc,
            self._task.config.num_fewshot,
            system_instruction=self._system,
            fewshot_as_multiturn=self._multiturn,
            gen_prefix=self._task.doc_to_prefix(doc),
            **chat,
        )
        made = self._task.construct_requests(doc=doc, ctx=context, metadata=(self.name, number, 1), **chat)
        return made if isinstance(made, list) else [made]

    def _delimiter(self, prompt: str) -> str:
        """What lm-eval puts between question and answer, as it does in examples and before choices."""
        prefix = self._task.config.gen_prefix
        if prompt != prompt.rstrip() or (self._chat and not (prefix and prefix == prefix.rstrip())):
            return ""
        return str(self._task.config.target_delimiter)

    def _reference(self, doc: Mapping[str, Any]) -> str:
        target = self._task.doc_to_target(doc)
        if self._task.config.doc_to_choice is not None:
            return str(self._task.doc_to_choice(doc)[target])
        return str(target[0] if isinstance(target, list) and target else target)

    def _gold(self, doc: Mapping[str, Any], choices: int) -> tuple[int, ...]:
        multiple = self._task.multiple_input
        target = self._task.doc_to_text(doc) if multiple else self._task.doc_to_target(doc)
        names = self._task.doc_to_choice(doc)
        numbers = [
            names.index(one) if isinstance(one, str) and one in names else one
            for one in (target if isinstance(target, list) else [target])
        ]
        if not numbers or not all(isinstance(number, int) and 0 <= number < choices for number in numbers):
            raise Unaskable("an answer that is not among the choices")
        return tuple(numbers)

    def _offered(self) -> list[str]:
        """The metrics that say right or wrong, tried on the first document with its reference for an answer."""
        doc = self._task.task_docs[0]
        names = [name for name, better in self._task.higher_is_better().items() if better]
        offered = []
        for ensemble in self._task._filters:
            for name in names:
                metric = f"{name},{ensemble.name}"
                try:
                    decides = _decides(self._values(doc, self._example(doc), metric))
                except Exception:  # what a task's own code makes of this example is no proof against real answers
                    decides = True
                if decides:
                    offered.append(metric)
        if not offered:
            raise UsageError(f"task '{self.name}' has no metric that says right or wrong of a single answer")
        return offered

    def _example(self, doc: Mapping[str, Any]) -> list[Any]:
        if self.kind == "generate_until":
            return [self._reference(doc)]
        count = len(self._task.doc_to_choice(doc)) if self.kind == "multiple_choice" else 1
        return [(-1.5 - number, False) for number in range(count)]

    def _values(self, doc: Mapping[str, Any], responses: Sequence[Any], metric: str) -> object:
        """One metric of one document, as lm-eval's evaluator comes by it."""
        name, _, wanted = metric.rpartition(",")
        return self._task.process_results(doc, self._filtered(doc, responses, wanted)).get(name)

    def _filtered(self, doc: Mapping[str, Any], responses: Sequence[Any], wanted: str) -> list[Any]:
        """The responses to one document as the filter of that name leaves them."""
        from lm_eval.api.instance import Instance

        instances = [
            Instance(self.kind, doc, (), number, resps=[response]) for number, response in enumerate(responses)
        ]
        ensemble = next(ensemble for ensemble in self._task._filters if ensemble.name == wanted)
        ensemble.apply(instances)
        return [instance.filtered_resps[wanted] for instance in instances]


def _ends(options: Mapping[str, Any]) -> tuple[tuple[str, ...], int]:
    """Stop strings and most tokens of an lm-eval generation."""
    from lm_eval.models.utils import normalize_gen_kwargs

    normal = normalize_gen_kwargs(dict(options), _MOST_GENERATED)
    until = normal.get("until") or []
    stops = [until] if isinstance(until, str) else until
    return tuple(stop for stop in stops if stop), int(normal["max_gen_toks"])


def _decides(value: object) -> bool:
    try:
        return float(value) in (0.0, 1.0)  # type: ignore[arg-type]  # what is no number says so itself
    except (TypeError, ValueError):
        return False
