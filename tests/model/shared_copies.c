/* Carries out a plan's copies one element at a time, for the Python suites: what the movers do
 * fast, done in the plainest way. */
#include <dray/plan.h>
#include <string.h>

int copies_run(const dray_copy *copies, uint64_t count, uint8_t *const *const *sources,
               uint8_t *const *destination);

/* Elements of equal dtypes only: 0, or the number (from 1) of a copy that converts.
 * sources: for each source its regions' memory; destination: its regions' memory. */
int copies_run(const dray_copy *copies, uint64_t count, uint8_t *const *const *sources,
               uint8_t *const *destination)
{
    for (uint64_t i = 0; i < count; i++) {
        const dray_copy *c = &copies[i];
        size_t size = dray_dtype_size((dray_dtype)c->source_dtype);
        if (c->source_dtype != c->destination_dtype)
            return (int)(i + 1);
        const uint8_t *from = sources[c->source][c->source_region] + c->source_offset;
        uint8_t *to = destination[c->destination_region] + c->destination_offset;
        int64_t at[DRAY_MAX_DIMS] = {0};
        for (uint32_t d = 0; d < DRAY_MAX_DIMS;) {
            int64_t a = 0, b = 0;
            for (d = 0; d < DRAY_MAX_DIMS; d++) {
                a += at[d] * c->source_stride[d];
                b += at[d] * c->destination_stride[d];
            }
            memcpy(to + b, from + a, size);
            for (d = 0; d < DRAY_MAX_DIMS && ++at[d] == c->extent[d]; d++)
                at[d] = 0;
        }
    }
    return 0;
}
