"""Which dimensions of a region's tensors are one axis of its iteration domain.

Every dimension is a list of atoms, outermost first. A pointwise operation makes the dimensions of
its operands equal, a reshape makes two flattened lists equal: equal lists are aligned by splitting
atoms until both sides have the same. What is left afterwards are the axes.
"""

from __future__ import annotations

from perfopt.backends.index import Index, Size, Unsupported, product, quotient

Dim = list[int]  # atoms, outermost first; [] for size 1


class AxisMap:
    """Atoms with their sizes, joined (union-find) and split as dimensions are made equal."""

    def __init__(self) -> None:
        self._sizes: list[Size] = []
        self._parent: list[int] = []
        self._split: dict[int, tuple[int, int]] = {}

    def fresh(self, size: Size) -> Dim:
        """A new dimension of `size` elements."""
        return [] if size == 1 else [self._atom(size)]

    def _atom(self, size: Size) -> int:
        self._sizes.append(size)
        self._parent.append(len(self._parent))
        return len(self._parent) - 1

    def _root(self, atom: int) -> int:
        while self._parent[atom] != atom:
            atom = self._parent[atom]
        return atom

    def resolve(self, dim: Dim) -> Dim:
        """The atoms of a dimension as they stand now."""
        result: Dim = []
        for atom in dim:
            root = self._root(atom)
            if root in self._split:
                result += self.resolve(list(self._split[root]))
            else:
                result.append(root)
        return result

    def size(self, atom: int) -> Size:
        """The number of positions of a resolved atom."""
        return self._sizes[atom]

    def unify(self, left: Dim, right: Dim) -> None:
        """Make two lists of atoms equal; raises `Unsupported` where their sizes do not align."""
        a, b = self.resolve(left), self.resolve(right)
        while a and b:
            x, y = a[0], b[0]
            if x == y:
                a, b = a[1:], b[1:]
                continue
            size_x, size_y = self._sizes[x], self._sizes[y]
            if size_x == size_y:
                self._parent[y] = x
            elif (rest := quotient(size_x, size_y)) is not None:
                self._divide(x, size_y, rest)
            elif (rest := quotient(size_y, size_x)) is not None:
                self._divide(y, size_x, rest)
            else:
                raise Unsupported(f"dimensions of {size_x} and {size_y} do not align")
            a, b = self.resolve(a), self.resolve(b)
        if a or b:
            raise Unsupported("dimensions of unequal length")

    def _divide(self, atom: int, outer: Size, inner: Size) -> None:
        self._split[atom] = (self._atom(outer), self._atom(inner))

    def index(self, dim: Dim) -> Index:
        """The position along a dimension as an index over its axes."""
        atoms = self.resolve(dim)
        terms = {
            axis_name(atom): product(self._sizes[a] for a in atoms[k + 1 :])
            for k, atom in enumerate(atoms)
        }
        return Index.of(terms)


def axis_name(atom: int) -> str:
    """The name of an atom's axis in kernels."""
    return f"a{atom}"
