"""Reads YAML that a user has written, and refuses what would be misread or would never end."""

import yaml

LARGEST, DEEPEST = 100_000, 50  # values of a text with its aliases written out, levels of nesting


class _Loader(yaml.SafeLoader):
    """Refuses a key that a mapping has twice, of which `yaml.safe_load` keeps the last value, and alias bombs.

    A few lines of aliases can stand for billions of values. Here each node counts its values when it is composed.
    """

    def __init__(self, text):
        super().__init__(text)
        self.counts, self.depth = {}, 0

    def compose_node(self, parent, index):
        if self.depth > DEEPEST:
            raise yaml.constructor.ConstructorError(problem=f"it is nested more than {DEEPEST} levels deep")
        alias, self.depth = self.check_event(yaml.AliasEvent), self.depth + 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        if alias and id(node) not in self.counts:
            raise yaml.constructor.ConstructorError(problem="it holds itself", problem_mark=node.start_mark)
        if not alias:
            parts = node.value if isinstance(node, yaml.CollectionNode) else []
            parts = [part for pair in parts for part in (pair if isinstance(pair, tuple) else (pair,))]
            count = 1 + sum(self.counts[id(part)] for part in parts)
            if count > LARGEST:
                problem = f"its aliases stand for more than {LARGEST:,} values"
                raise yaml.constructor.ConstructorError(problem=problem, problem_mark=node.start_mark)
            self.counts[id(node)] = count
        return node

    def compose_mapping_node(self, anchor):
        # here, and not when values are made: by then a merge key has added the keys that the mapping overrides
        node, lines = super().compose_mapping_node(anchor), {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                line = key.start_mark.line + 1
                if key.value in lines:
                    where = f"in line {lines[key.value]} and in line {line}" if lines[key.value] != line else "twice"
                    problem = f"{key.value} stands {where}; remove one of them"
                    raise yaml.constructor.ConstructorError(problem=problem, problem_mark=key.start_mark)
                lines[key.value] = line
        return node


def read_yaml(text: str) -> object:
    """The value of a YAML text of plain values.

    Raises:
        yaml.YAMLError: it is no YAML, a mapping has a key twice, or it stands for too many values.
    """
    try:
        return yaml.load(text, _Loader)
    except RecursionError:
        raise yaml.constructor.ConstructorError(problem="it is nested too deeply") from None
    except ValueError as error:  # e.g. a date that does not exist
        raise yaml.constructor.ConstructorError(problem=str(error)) from None
