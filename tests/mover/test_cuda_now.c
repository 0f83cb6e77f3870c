/* Tests single operations on a GPU (cuda_now.c). The sums of many parts of a region equal those of
 * dray__sum. The largest numbers are those that formats with a global scale need. */
#include "cuda_memory.h"

#include "mover/mover.h"

#include <dray/gpu.h>
#include <string.h>

/* Many at once, of several kernels: their elements are 1 to 8 bytes. */
TEST(test_sums_of_many_parts)
{
    enum { PARTS = 150, COLUMNS = 96 };
    const int64_t shape[2] = {INT32_MAX, COLUMNS};
    for (int i = 0; i < test_times(5); i++) {
        dray__sum_part parts[PARTS];
        int64_t start[PARTS][2], extent[PARTS][2], stride[PARTS][2];
        uint64_t sums[PARTS];
        uint32_t count = 1 + (uint32_t)draw(PARTS);
        dray_error e = {0};
        dray_region *region = NULL;
        both memory = both_new((size_t)PARTS * 1024 * COLUMNS);
        done(NULL, &e, dray_region_wrap_cuda(memory.device, memory.bytes, "test", &region, &e));
        for (uint32_t k = 0; k < count; k++) {
            int32_t dtype = (int32_t[]){DRAY_U8, DRAY_BF16, DRAY_F32, DRAY_F64}[draw(4)];
            int64_t size = (int64_t)dray_dtype_size((dray_dtype)dtype);
            for (int d = 0; d < 2; d++) {
                start[k][d] = (int64_t)draw(COLUMNS / 2);
                extent[k][d] = 1 + (int64_t)draw(COLUMNS / 2);
                stride[k][d] = d ? size : COLUMNS * size;
            }
            dray__sum_of of = {dtype, 2, shape, start[k], extent[k], stride[k], NULL};
            parts[k] = (dray__sum_part){k * 1024u * COLUMNS, of};
        }
        done(NULL, &e, dray__sum_region(region, parts, count, sums, &e));
        for (uint32_t k = 0; k < count; k++) {
            parts[k].of.data = memory.host + parts[k].offset;
            assert_int_equal(sums[k], dray__sum(&parts[k].of));
        }
        dray_region_free(region);
        both_free(&memory);
    }
}

/* The largest magnitude of boxes of bf16 whose rows lie one behind the other, or apart. */
TEST(test_largest_of_boxes)
{
    dray_layout *layout;
    const int64_t whole[2] = {INT32_MAX, 1024};
    assert_int_equal(dray_layout_new(&layout, NULL), DRAY_OK);
    assert_int_equal(dray_layout_add_tensor(layout, "w", DRAY_BF16, 2, whole, NULL, NULL), 0);
    for (int i = 0; i < test_times(20); i++) {
        int64_t columns = 8 * (1 + (int64_t)draw(64)), lines = 1 + (int64_t)draw(300);
        int64_t pitch = columns + (draw(2) ? 8 * (int64_t)draw(8) : 0);
        both memory = both_new((size_t)(lines * pitch) * 2);
        dray__cuda_quant q = {.kind = DRAY_TRANSFORM_MOST,
                              .dtype = DRAY_BF16,
                              .quant_dtype = DRAY_F8E4M3,
                              .ndim = 2,
                              .extent = {lines, columns},
                              .cell = {1 << 30, 1 << 30},
                              .source = memory.device,
                              .source_stride = {2 * pitch, 2},
                              .destination_stride = {0, 1}};
        dray__cuda_job_options o = {.quants = &q, .quant_count = 1, .sums = DRAY__CUDA_SUM_MOST};
        uint32_t most = 0;
        dray__cuda_job *job;
        dray_error e = {0};
        for (int64_t k = 0; k < lines * pitch; k++) {
            uint32_t bits = (uint32_t)(memory.host[2 * k] | (memory.host[2 * k + 1] & 0x7F) << 8);
            most = k % pitch < columns && bits << 16 > most ? bits << 16 : most;
        }
        done(NULL, &e, dray__cuda_job_new(gpu, layout, NULL, 0, &o, &job, &e));
        done(job, &e, run(job, &e));
        assert_int_equal(dray__cuda_job_sums(job, DRAY__CUDA_SUM_MOST)[0], most);
        dray__cuda_job_close(job);
        both_free(&memory);
    }
    dray_layout_free(layout);
}

int main(void)
{
    gpu_begin(gpu_is_real() ? 1 : 2);
    return suite_run(set_up, tear_down);
}
