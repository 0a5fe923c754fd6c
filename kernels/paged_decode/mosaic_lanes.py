"""What the Mosaic decode kernel does thread by thread, in MLIR."""

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.mosaic.gpu import utils as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from rlt_jax.kernels.compat import arith, ir, llvm

_WARP, _WARPGROUP = 32, 128


def rows_layout(width: int):
    """[rows, width], rows a multiple of 4: a row in each warp."""
    return plgpu.Layout.TILED(plgpu.Tiling(((4, width), (width // _WARP,))), (-3,), (-2,), -1)


def row_layout(width: int):
    """[width]: the same in all warps."""
    tiling = plgpu.Tiling(((width,), (width // _WARP,)))
    return plgpu.Layout.TILED(tiling, (plgpu.Replicated(4),), (-2,), -1)


def store_rows(sums_ref, peaks_ref, totals_ref, sum_qx, peak_q, total_q, first, rows: int):
    """Stores some rows of arrays that lie as wgmma leaves them, [64, x] and [64]."""
    ref, per_row = plgpu.RefType(), plgpu.Layout.WGMMA.reduce(1)
    scalar = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(ref, ref, ref, plgpu.Layout.WGMMA, per_row, per_row, scalar))
    def store(ctx, sums_ref, peaks_ref, totals_ref, sum_qx, peak_q, total_q, first):
        del ctx
        first = first.registers.item()
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()

        def constant(value):
            return mgpu.c(value, i32)

        width = sum_qx.shape[1]
        thread = arith.remui(mgpu.thread_idx(), constant(_WARPGROUP))
        warp, lane = (op(thread, constant(_WARP)) for op in (arith.divui, arith.remui))
        quad, in_quad = (op(lane, constant(4)) for op in (arith.divui, arith.remui))
        sums, peaks, totals = map(mgpu.memref_ptr, (sums_ref, peaks_ref, totals_ref))
        # A warp holds 16 rows as two halves of 8, a quad of lanes a row of each.
        for half in range(2):
            row = arith.addi(arith.muli(warp, constant(16)), arith.addi(quad, constant(8 * half)))
            row = arith.subi(row, first)
            # Unsigned: rows before the first are far above.
            wanted = arith.cmpi(arith.CmpIPredicate.ult, row, constant(rows))
            with mgpu.when(wanted):
                column = arith.muli(in_quad, constant(2))
                start = arith.addi(arith.muli(row, constant(width)), column)
                for tile in range(width // 8):
                    value = _register(sum_qx, tile, half)
                    place = arith.addi(start, constant(8 * tile))
                    llvm.store(value, mgpu.getelementptr(sums, [place], f32))
                for per_row_ref, values in ((peaks, peak_q), (totals, total_q)):
                    place = mgpu.getelementptr(per_row_ref, [row], f32)
                    llvm.store(_register(values, 0, half), place)

    store(sums_ref, peaks_ref, totals_ref, sum_qx, peak_q, total_q, first)


def count_finished(finished_ref, last_ref, pair, splits):
    """Counts a stored split; whether it is the last of its row and group. [1] and [pairs] int32.

    The last one leaves a zero in the count. It sees what the others have stored: every thread's
    stores come before the barrier, and the count is added with release and acquire.
    """
    ref, splat = plgpu.RefType(), plgpu.Layout.WG_SPLAT
    returned = plgpu.ShapeDtypeStruct((), jnp.int32, layout=splat(()))

    @plgpu.inline_mgpu(arg_types=(ref, ref, splat(())), return_type=returned)
    def count(ctx, finished_ref, last_ref, splits):
        del ctx
        i32 = ir.IntegerType.get_signless(32)
        splits = splits.registers.item()
        counter = mgpu.memref_ptr(finished_ref)
        last = mgpu.memref_ptr(last_ref)
        mgpu.warpgroup_barrier()
        with mgpu.when(mgpu.single_thread_predicate(mgpu.ThreadSubset.WARPGROUP)):
            before = mgpu.inline_ptx(
                "fence.acq_rel.gpu; atom.acq_rel.gpu.global.add.u32 $0, [$1], 1;",
                counter,
                result_types=i32,
                has_side_effects=True,
            )
            after = arith.addi(before, mgpu.c(1, i32))
            is_last = arith.cmpi(arith.CmpIPredicate.eq, after, splits)
            with mgpu.when(is_last):
                llvm.store(mgpu.c(0, i32), counter)
            llvm.store(arith.extui(i32, is_last), last)
        mgpu.warpgroup_barrier()
        found = llvm.load(i32, last, volatile_=True)
        mgpu.inline_ptx("fence.acq_rel.gpu;", has_side_effects=True)
        return fragmented_array.FragmentedArray.splat(found, (), is_signed=True)

    return count(finished_ref, last_ref.at[pl.ds(pair, 1)], splits) == 1


def _register(array, tile, half):
    """A thread's values in a half of its warp's rows and a tile of 8 columns."""
    return array.registers.reshape(-1, 2)[tile, half]
