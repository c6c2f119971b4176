"""The tasks: needles, lists, chains, associative recall, common words, second mentions, copying, facts, questions.

    niah, niah_multi   one key and value, or four of them, in filler text (RULER, arXiv:2404.06654)
    kv                 a list of keys and values that fills the context; the question is the value of one key
    variables          three chains of two assignments each; the question is the value of the last name of one chain
    mqar               keys and values, then every key again in another order (Zoology, arXiv:2312.04927)
    common_words       a list in which one word occurs much more often than the others
    mentions           real text: the second token of a rare pair that occurs for the second time in the window
    copy               real text: a passage begins again at the end, and goes on as before
    fact               as niah, in a form for pretrained models: "The code of NAME is NOUN."; the nouns are things that
                       a model does not expect there
    facts              one of four such sentences, which SmolLM2-135M-Instruct confuses
    pairs              one of four facts in sentences: "The password of Anna is lemon. The symbol of Peter is tower."
    question           one of four sentences as a person would write them, "Anna has lost the lemon.", asked in words:
                       "What has Anna lost?"

The probes with `Task.asks` can be asked as a chat: see `Material`.

Every function takes the material, a length, a depth and a random generator, and returns one `Sample` of exactly this
length. In the control of a sample, the context has other values. So the difference between the two scores measures
recall.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from hf_memmix.errors import UserError
from hf_memmix.training.evaluation.probes.material import MAX_WORD_TOKENS, Answer, Material, Sample

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)  # where answers stand, from the start to the end
NEEDLES = 4
CHAINS, HOPS = 3, 2
NAMES = 64  # the number of keys used in sentences; the first ones are names
NEAR = 24  # a needle is moved by at most this number of tokens to the end of a sentence
COMMON_EVERY = 4  # every fourth word of the list is the same one
RARE_PAIR = 8  # a pair is rare if it occurs at most this often in the whole text, so that it must be recalled
WINDOWS = 64  # number of windows that are tried to find a second mention
FACTS = 4  # sentences of which one is asked for
CUE, COPIED = 8, 8  # tokens of a passage that are given again, and those that a model adds
MENTIONS = 16  # largest number of answers per window; the control changes the first mention of each
# Tokens of one task and length that are in memory at a time. With 8,192 tokens, one takes 16 bytes in lists of
# needles, 19 of dictionaries and 43 of associative recall (tracemalloc): 4, 5 and 12 GB at this limit.
MAX_CELL_TOKENS = 2**28


PAIR_LINE = (":", "\n")  # what follows the key and the value of a dictionary's line


@dataclass(frozen=True)
class Task:
    """`depths`: whether a sample is drawn for a depth. Otherwise each answer has a depth of its own, or None.

    asks: whether it is a question, which can be asked as a chat.
    """

    make: Callable[[Material, int, float, random.Random], Sample]
    depths: bool
    asks: bool = False


@dataclass(frozen=True)
class Form:
    """How a fact is said and asked; `{}` stands for the key, with a space before it.

    said: the words before the value. In a text they are the question as well, and the answer to `question` begins so.
    question: what a chat asks.
    in_words: whether a text asks the question, too.
    """

    said: str
    question: str
    in_words: bool = False

    def told(self, material: Material, key) -> tuple[int, ...]:
        before, after = self.said.split("{}")
        return sentence(material, before, key, after)

    def asked(self, material: Material, key) -> tuple[list[int], list[int]]:
        """The tokens between a text and an answer, and those with which the answer begins; the value follows."""
        if not (material.chat or self.in_words):
            return [], [*self.told(material, key)]
        before, after = self.question.split("{}")
        answer = self.said.format(" " + key[0]).lstrip()
        if material.chat:
            return [*sentence(material, "\n\n" + before, key, after), *material.turn], material.encode(answer)
        question = sentence(material, "\n\nQuestion: " + before, key, after + "\nAnswer:")
        return [*question], material.piece(" " + answer)


PASSWORD = Form(" The password of{} is", "What is the password of{}?")
CODE = Form(" The code of{} is", "What is the code of{}?")
CHAIN = Form(" So what{} has is the", "What does{} have?")
# the forms of four facts in which SmolLM2-135M-Instruct answers best, see training/experiments/smollm2
_THINGS = ("code", "password", "nickname", "favorite word", "secret", "symbol")
THINGS = tuple(Form(f" The {thing} of{{}} is", f"What is the {thing} of{{}}?") for thing in _THINGS)
SENTENCES = (
    Form("{} has lost the", "What has{} lost?", in_words=True),
    Form("{} is looking for the", "What is{} looking for?", in_words=True),
    Form("{} drew a picture of the", "Of what did{} draw a picture?", in_words=True),
    Form("{} wrote a letter about the", "What did{} write a letter about?", in_words=True),
    Form("{} dreams of the", "What does{} dream of?", in_words=True),
    Form("{} has sold the", "What has{} sold?", in_words=True),
)


def check_tasks(text: str, chat: bool = False) -> tuple[str, ...]:
    """The tasks that a user names: names with commas between them, or "all", which in a chat are all questions.

    Raises:
        ValueError: there is no such task, one is named twice, or is no question for a chat.
    """
    known = tuple(task for task in TASKS if TASKS[task].asks or not chat)
    names = known if text == "all" else tuple(part.strip() for part in text.split(","))
    if unknown := [task for task in names if task not in TASKS]:
        raise UserError(f"task {unknown[0]!r} is unknown; there are {', '.join(TASKS)}")
    if others := [task for task in names if task not in known]:
        raise UserError(f"task {others[0]!r} asks nothing, so it is no chat; there are {', '.join(known)}")
    if repeated := [task for task in names if names.count(task) > 1]:
        raise UserError(f"task {repeated[0]!r} is named twice; name each task once")
    return names


def refuse_repeated(name: str, values) -> None:
    """Raise ValueError for a task, length or depth that is named twice: its answers would count twice."""
    if repeated := [value for value in values if list(values).count(value) > 1]:
        raise UserError(f"{name} {repeated[0]!r} is named twice; name each {name} once")


def check_grid(tasks, lengths, depths, samples: int, readable=None) -> None:
    """Raise UserError as `run_probes` does; `readable`: the lengths that a model can read, by default all."""
    if unknown := [task for task in tasks if task not in TASKS]:
        raise UserError(f"task {unknown[0]!r} is unknown; there are {', '.join(TASKS)}")
    for name, values in (("task", tasks), ("length", lengths), ("depth", depths)):
        refuse_repeated(name, values)
    if bad := [depth for depth in depths if not 0 <= depth <= 1]:
        raise UserError(f"depth {bad[0]} is outside 0 to 1")
    if samples < 1 or not (tasks and lengths and depths):
        raise UserError("give at least one task, one length, one depth and one sample")
    depth_count = max(len(depths) if TASKS[task].depths else 1 for task in tasks)
    longest = max(lengths if readable is None else readable, default=0)
    if (tokens := longest * depth_count * samples) > MAX_CELL_TOKENS:
        raise UserError(
            f"length {longest} needs {tokens} tokens for {depth_count} depths of {samples} samples, the limit is "
            f"{MAX_CELL_TOKENS}; give shorter lengths, fewer depths or fewer samples"
        )


def draw(task: str, material: Material, length: int, depth: float | None, seed: int, count: int) -> list[Sample]:
    """`count` samples of a cell. The same arguments give the same samples.

    Raises:
        ValueError: there is no such task, it is no question for the chat of the material, or it does not fit in
            `length` tokens.
    """
    check_tasks(task, material.chat)
    samples = []
    for i in range(count):
        source = random.Random(f"{seed} {task} {length} {depth} {i}")
        samples.append(TASKS[task].make(material, length, depth, source))
        assert len(samples[-1].ids) == len(samples[-1].control) == length
    return samples


def sentence(material: Material, *parts) -> tuple[int, ...]:
    """The joined tokens of strings and of words of the material."""
    return tuple(t for part in parts for t in (material.piece(part) if isinstance(part, str) else part[1]))


def has_value(material: Material, name, value) -> tuple[int, ...]:
    """The first sentence of a chain of variables."""
    return sentence(material, name, " has the", value, ".")


def has_the_same(material: Material, name, other) -> tuple[int, ...]:
    """A further sentence of a chain: `name` has what `other` has."""
    return sentence(material, name, " has what", other, " has.")


def _fit(needed: int, length: int, what: str) -> int:
    if needed > length:
        raise UserError(f"{what} needs {needed} tokens, the length is {length}; give a longer one")
    return length - needed


def _haystack(material: Material, length: int, draw: random.Random, needles, asked, answer, candidates) -> Sample:
    """Filler with sentences at their depths, then a question and its answer.

    needles: rows (depth, tokens, tokens in the control). The question is about the first one.
    asked: of `Form`.
    """
    size, question = sum(len(tokens) for _, tokens, _ in needles), [*asked[0], *asked[1]]
    room = _fit(len(material.start) + size + len(question) + len(answer), length, "this probe")
    ids, control = _spread(material, room, draw, needles)
    firsts = tuple(tokens[0] for _, tokens in candidates)
    depth, said, said_in_control = needles[0]
    start = length - len(answer)
    begins = start - len(asked[1]) if asked[0] else start
    answers = [Answer(start, length, depth, firsts, said != said_in_control, begins)]
    return Sample([*ids, *question, *answer], [*control, *question, *answer], answers)


def _spread(material: Material, room: int, draw: random.Random, needles) -> tuple[list[int], list[int]]:
    """The beginning of a text and `room` tokens of filler with needles as those of `_haystack`; and its control."""
    filler = material.window(room, draw)
    ids, control, last = list(material.start), list(material.start), 0
    for depth, tokens, other in sorted(needles, key=lambda row: row[0]):
        here = max(last, sentence_end(material, filler, round(depth * room)))
        ids += [*filler[last:here], *tokens]
        control += [*filler[last:here], *other]
        last = here
    return ids + filler[last:], control + filler[last:]


def sentence_end(material: Material, filler: list[int], place: int) -> int:
    """The nearest end of a sentence if it is at most NEAR tokens from `place`, else `place`."""
    stop = material.piece(".")[-1]
    ends = [i for i in range(max(0, place - NEAR), min(len(filler), place + NEAR)) if i == 0 or filler[i - 1] == stop]
    return min(ends, key=lambda i: abs(i - place), default=place)


def _equally_long(values: list, chosen: list, draw: random.Random) -> list:
    """For the control: another value with as many tokens for each chosen one.

    It is not chosen itself, except in a long sequence, which has all values. A value stays if no other has its number
    of tokens.
    """
    others, taken = [], set(chosen)
    equal = {size: [v for v in values if len(v[1]) == size] for size in {len(v[1]) for v in chosen}}
    free = {size: [v for v in found if v not in taken] for size, found in equal.items()}
    for value in chosen:
        size = len(value[1])
        same = free[size] or [v for v in equal[size] if v != value]
        others.append(draw.choice(same) if same else value)
    return others


def needle(
    material: Material,
    length: int,
    depth: float,
    draw: random.Random,
    count: int = 1,
    forms: tuple[Form, ...] = (PASSWORD,),
    words: list | None = None,
    names: list | None = None,
) -> Sample:
    """forms: each needle has another one, if there are enough. names, words: keys and values; None: the material's."""
    names, words = names or material.keys[:NAMES], words or material.values
    keys, values = draw.sample(names, count), draw.sample(words, count)
    others = _equally_long(words, values[:1], draw) + values[1:]
    forms = draw.sample(forms, count) if len(forms) >= count > 1 else forms[:1] * count
    needles = []
    for i in range(count):
        where = depth if i == 0 else draw.random()
        texts = [(*forms[i].told(material, keys[i]), *sentence(material, v, ".")) for v in (values[i], others[i])]
        needles.append((where, *texts))
    question = forms[0].asked(material, keys[0])
    # with one needle, the other candidates are not in the context; with several, they are the values of the other keys
    candidates = values if count > 1 else [values[0], *draw.sample([v for v in words if v not in values], 7)]
    return _haystack(material, length, draw, needles, question, values[0][1], candidates)


def needles(material: Material, length: int, depth: float, draw: random.Random) -> Sample:
    return needle(material, length, depth, draw, NEEDLES)


def variables(material: Material, length: int, depth: float, draw: random.Random) -> Sample:
    values = draw.sample(material.values, CHAINS)
    others = _equally_long(material.values, values[:1], draw) + values[1:]
    names = draw.sample(material.keys[:NAMES], CHAINS * (HOPS + 1))
    needles = []
    for chain in range(CHAINS):
        name = names[chain * (HOPS + 1) : (chain + 1) * (HOPS + 1)]
        begin = depth if chain == 0 else draw.random()
        for hop in range(
            HOPS + 1
        ):  # the sentences of a chain stand in order, from its depth to the end of the context
            where = begin + (1 - begin) * hop / (HOPS + 1)
            if hop:
                texts = [has_the_same(material, name[hop], name[hop - 1])] * 2
            else:
                texts = [has_value(material, name[0], value) for value in (values[chain], others[chain])]
            needles.append((where, *texts))
    question = CHAIN.asked(material, names[HOPS])
    return _haystack(material, length, draw, needles, question, values[0][1], values)


def _pairs(material: Material, room: int, draw: random.Random, *frame: str) -> tuple[list, list]:
    """Pairs of a key and a value that fit in `room` tokens, and the tokens of each pair.

    `frame`: a string after the key and one after the value.
    """
    pairs, texts, size = [], [], 0
    for key in draw.sample(material.keys, len(material.keys)):
        value = draw.choice(material.values)
        tokens = _pair_tokens(material, key, value, frame)
        size += len(tokens)
        if size > room:
            break
        pairs.append((key, value))
        texts.append(tokens)
    if len(pairs) < 4:
        raise UserError(f"{room} tokens have room for {len(pairs)} pairs of key and value; give a longer length")
    return pairs, texts


def _pair_tokens(material: Material, key, value, frame) -> tuple[int, ...]:
    return sentence(material, key, *frame[:1], value, *frame[1:])


def dictionary(material: Material, length: int, depth: float, draw: random.Random) -> Sample:
    room = length - len(material.start) - 2 * MAX_WORD_TOKENS - len(sentence(material, *PAIR_LINE))
    pairs, texts = _pairs(material, room, draw, *PAIR_LINE)
    asked = round(depth * (len(pairs) - 1))
    key, value = pairs[asked]
    (other,) = _equally_long(material.values, [value], draw)
    tail = [*sentence(material, key, ":"), *value[1]]
    head = [*material.start, *material.window(length - len(material.start) - sum(map(len, texts)) - len(tail), draw)]
    control_texts = texts[:asked] + [_pair_tokens(material, key, other, PAIR_LINE)] + texts[asked + 1 :]
    firsts = tuple({v[1][0]: None for _, v in pairs})
    answers = [Answer(length - len(value[1]), length, depth, firsts, other != value)]
    return Sample(head + _joined(texts) + tail, head + _joined(control_texts) + tail, answers)


def recall(material: Material, length: int, depth: float | None, draw: random.Random) -> Sample:
    pairs, texts = _pairs(material, (length - len(material.start)) // 2, draw)
    others = _equally_long(material.values, [value for _, value in pairs], draw)
    control_texts = [_pair_tokens(material, key, other, ()) for (key, _), other in zip(pairs, others, strict=True)]
    head = [*material.start, *material.window(length - len(material.start) - 2 * sum(map(len, texts)), draw)]
    firsts = tuple({value[1][0]: None for _, value in pairs})
    queries, answers, end = [], [], len(head) + sum(map(len, texts))
    for i in draw.sample(range(len(pairs)), len(pairs)):
        queries += texts[i]
        end += len(texts[i])
        value = pairs[i][1]
        answers.append(Answer(end - len(value[1]), end, i / (len(pairs) - 1), firsts, others[i] != value))
    return Sample(head + _joined(texts) + queries, head + _joined(control_texts) + queries, answers)


def _joined(parts) -> list[int]:
    return [token for part in parts for token in part]


def common_words(material: Material, length: int, depth: float | None, draw: random.Random) -> Sample:
    question, comma = sentence(material, ".\n The word that stands here most often is"), sentence(material, ",")
    often, *rest = draw.sample(material.values, len(material.values))
    (other,) = _equally_long(rest, [often], draw)
    rest = [word for word in rest if word is not other]
    room = length - len(material.start) - len(question) - len(often[1])
    items, size = [], 0
    while True:
        word = rest[len(items) % len(rest)] if len(items) % COMMON_EVERY else often
        size += len(word[1]) + len(comma)
        if size > room:
            break
        items.append(word)
    if len(items) <= 2 * COMMON_EVERY:
        raise UserError(f"common_words needs more than {length} tokens; give a longer length")
    draw.shuffle(items)
    filler = material.window(room - sum(len(word[1]) + len(comma) for word in items), draw)
    texts, control_texts = (_joined((*word[1], *comma) for word in words)
                  for words in (items, [other if word is often else word for word in items]))  # fmt: skip
    head, tail = [*material.start, *filler], [*question, *often[1]]
    firsts = tuple({word[1][0]: None for word in items})
    answers = [Answer(length - len(often[1]), length, None, firsts, other is not often)]
    return Sample(head + texts + tail, head + control_texts + tail, answers)


def mentions(material: Material, length: int, depth: float | None, draw: random.Random) -> Sample:
    for _ in range(WINDOWS):
        ids = [*material.start, *material.window(length - len(material.start), draw)]
        if found := _second_mentions(material, ids):
            break
    else:
        raise UserError(f"the text repeats no rare pair of words within {length} tokens; give a longer length")
    found = sorted(draw.sample(found, min(MENTIONS, len(found))))
    asked = {position for _, position in found}
    control = list(ids)
    for first, _ in found:
        if first not in asked:
            control[first] = draw.choice(ids)
    answers = [Answer(at, at + 1, first / at, replaced=control[first] != ids[first]) for first, at in found]
    return Sample(ids, control, answers)


def copy(material: Material, length: int, depth: float, draw: random.Random) -> Sample:
    whole, line = CUE + COPIED, material.piece("\n")
    room = _fit(len(material.start) + len(line) + whole, length, "this probe")
    for _ in range(WINDOWS if room >= whole else 0):
        filler = material.window(room, draw)
        at = min(sentence_end(material, filler, round(depth * room)), room - whole)
        cue, answer = filler[at : at + CUE], filler[at + CUE : at + whole]
        if sum(filler[i : i + CUE] == cue for i in range(room)) == 1:
            break
    else:
        raise UserError(f"{length} tokens of the text have no passage that occurs once; give another length or text")
    other = material.window(COPIED, draw)
    control = [*filler[: at + CUE], *other, *filler[at + whole :]]
    tail = [*line, *cue, *answer]
    answers = [Answer(length - COPIED, length, depth, replaced=other != answer)]
    return Sample([*material.start, *filler, *tail], [*material.start, *control, *tail], answers)


def _second_mentions(material: Material, ids: list[int]) -> list[tuple[int, int]]:
    """Positions of the second token of rare pairs: at the first mention and at the second one."""
    seen, found = {}, []
    for i in range(len(material.start), len(ids) - 1):
        pair = ids[i], ids[i + 1]
        if material.pair_counts[pair] > RARE_PAIR or not material.is_word(pair[1]):
            continue
        if pair in seen:
            found.append((seen.pop(pair), i + 1))
        else:
            seen[pair] = i + 1
    return found


def fact(material: Material, length: int, depth: float, draw: random.Random) -> Sample:
    return needle(material, length, depth, draw, forms=(CODE,), words=material.nouns)


def facts(material: Material, length: int, depth: float, draw: random.Random) -> Sample:
    return needle(material, length, depth, draw, FACTS, (CODE,), material.nouns)


def pairs_of(material: Material, length: int, depth: float, draw: random.Random, forms=THINGS) -> Sample:
    return needle(material, length, depth, draw, FACTS, forms, material.nouns, material.people)


def asked_in_words(material: Material, length: int, depth: float, draw: random.Random) -> Sample:
    return pairs_of(material, length, depth, draw, SENTENCES)


TASKS = {
    "niah": Task(needle, True, asks=True),
    "niah_multi": Task(needles, True, asks=True),
    "kv": Task(dictionary, True),
    "variables": Task(variables, True, asks=True),
    "mqar": Task(recall, False),
    "common_words": Task(common_words, False),
    "mentions": Task(mentions, False),
    "copy": Task(copy, True),
    "fact": Task(fact, True, asks=True),
    "facts": Task(facts, True, asks=True),
    "pairs": Task(pairs_of, True),
    "question": Task(asked_in_words, True, asks=True),
}
