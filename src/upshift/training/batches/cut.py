"""Decide by the plan which of a global batch's collated rows run together. The rows of the global batch stay the same."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from upshift.planning.plan import Plan
from upshift.training.batches.collated import CollatedRows
from upshift.training.batches.fill import MicroBatch
from upshift.training.batches.layout import Layout, RowGroup, lay_out


def cut_rows(rows: CollatedRows, plan: Plan, *, classes: Sequence[Sequence[int]], trims: bool) -> list[RowGroup]:
    """Return groups of rows, longest first. Rows of different ``classes`` stay apart."""
    widths = [rows.anatomies[number].width for number, _ in rows.places]
    widest = max(widths)
    if not trims:  # the loss looks at padding: each row keeps the width it came with
        classes = [[row for row in members if widths[row] == width] for members in classes for width in sorted({*widths})]
    layout = Layout(
        micro_batch=plan.per_device_train_batch_size,
        packing=plan.packing,
        flatten=plan.flattens,
        pad_multiple=min(plan.pad_multiple, widest),
    )
    groups = []
    for members in filter(None, classes):
        lengths = [rows.lengths[row] if trims else widths[row] for row in members]
        room = max(plan.sequence_length, *lengths) if plan.packing else widest if trims else lengths[0]
        for group in lay_out(lengths, layout, sequence_length=room)[0]:
            own = tuple(tuple(members[index] for index in row) for row in group.rows)
            groups.append(RowGroup(own, group.width))
    return sorted(groups, key=lambda group: -group.num_padded_tokens)


def halve_group(group: RowGroup, rows: CollatedRows, plan: Plan) -> tuple[RowGroup, RowGroup] | None:
    """Return two groups with the same rows, or with the sequences of one long row. Return None if the group is indivisible."""
    if len(group.rows) > 1:
        middle = (len(group.rows) + 1) // 2
        return RowGroup(group.rows[:middle], group.width), RowGroup(group.rows[middle:], group.width)
    members = group.rows[0]
    if len(members) < 2:
        return None
    middle = len(members) // 2
    first, second = (sum(rows.lengths[row] for row in part) for part in (members[:middle], members[middle:]))
    return RowGroup((members[:middle],), first), RowGroup((members[middle:],), second)


def micro_batch_of(rows: CollatedRows, group: RowGroup, *, plan: Plan, drops_mask: bool, by_rows: bool) -> MicroBatch:
    """Return the micro-batch of a group. ``by_rows`` says that the loss is a mean over rows, not over labels."""
    inputs = rows.build(group, pad_multiple=plan.pad_multiple, drop_mask=drops_mask)
    members = [member for row in group.rows for member in row]
    return MicroBatch(
        arrays={name: value.numpy() for name, value in inputs.items()},
        sequence_ids=np.array(members, np.int64),
        num_label_tokens=len(members) if by_rows else sum(rows.num_labels[row] for row in members),
        num_tokens=sum(rows.lengths[row] for row in members),
    )
