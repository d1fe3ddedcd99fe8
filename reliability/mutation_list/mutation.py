"""Record of a mutation."""

from typing import NamedTuple


class Mutation(NamedTuple):
    """file: from the root of the tree. text: occurs once in it. tests: files or test ids from python_tests/."""

    name: str
    file: str
    text: str
    replacement: str
    tests: tuple[str, ...]
    fault: str

    @property
    def compiled(self) -> bool:
        """Whether the extension must be compiled."""
        return self.file.startswith("csrc/")

    def applied_to(self, source: str) -> str:
        """Source with the fault. Raises ValueError unless the text occurs once."""
        if source.count(self.text) != 1:
            raise ValueError(f"{self.name}: the text occurs {source.count(self.text)} times in {self.file}")
        return source.replace(self.text, self.replacement)
