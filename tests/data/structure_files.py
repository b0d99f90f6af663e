"""PDB and mmCIF files that tests write, an atom at a time."""

from collections.abc import Callable

from graphattn.data import Structure

ReadText = Callable[..., Structure]  # the fixture `structure_of`


def pdb_line(
    name="CA", residue="ALA", chain="A", number=1, position=(0.0, 0.0, 0.0), *, hetero=False,
    altloc=" ", insertion=" ",
) -> str:  # fmt: skip
    x, y, z = position
    record = "HETATM" if hetero else "ATOM"
    return (
        f"{record:6}{1:5d}  {name:<3}{altloc}{residue:>3} {chain}{number:>4}{insertion}   "
        f"{x:8.3f}{y:8.3f}{z:8.3f}  1.00  0.00           {name[0]:<2}"
    )


CIF_COLUMNS = dict(
    line.split()
    for line in """\
        group_PDB ATOM
        id 1
        type_symbol C
        label_atom_id CA
        label_alt_id .
        label_comp_id ALA
        label_asym_id A
        label_seq_id 1
        pdbx_PDB_ins_code ?
        Cartn_x 1.5
        Cartn_y 2.5
        Cartn_z 3.5
        auth_seq_id 1
        auth_comp_id ALA
        auth_asym_id A
        auth_atom_id CA
        pdbx_PDB_model_num 1""".splitlines()
)


def mmcif(*rows: dict[str, str], without: tuple[str, ...] = ()) -> str:
    columns = [column for column in CIF_COLUMNS if column not in without]
    lines = ["data_test", "#", "loop_", *(f"_atom_site.{column}" for column in columns)]
    lines += [" ".join((CIF_COLUMNS | row)[column] for column in columns) for row in rows]
    return "\n".join([*lines, "#", ""])


def residue(name: str, number: int, **values: str) -> dict[str, str]:
    names = {"label_comp_id": name, "auth_comp_id": name}
    return names | {"label_seq_id": str(number), "auth_seq_id": str(number)} | values
