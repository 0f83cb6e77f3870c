/* The value model's loss (value.h has the formula and its source). */
#include "engine/value.h"

#include "base/error.h"

#include <math.h>

int dray__value_check(const dray__value_batch *batch, dray_error *error)
{
    if (!batch->returns)
        return dray__fail(error, DRAY_EINVALID, "value batch: no returns");
    if (!(batch->clip >= 0))
        return dray__fail(error, DRAY_EINVALID,
                          "value batch: clip of at least 0 expected, found %g", batch->clip);
    if (batch->clip > 0 && !batch->values)
        return dray__fail(error, DRAY_EINVALID,
                          "value batch: clip %g, and no values that it is from", batch->clip);
    return dray__aggregate_check(batch->aggregate, batch->length, error);
}

double dray__value_token(const dray__value_batch *b, uint64_t token, uint32_t row, double value,
                         dray__policy_sums *sums)
{
    if ((b->masked && b->masked[row]) || !dray__token_counts(&b->sequences, token))
        return 0;
    double share = dray__aggregate_share(b->aggregate, &b->sequences, row);
    double aim = (double)b->returns[token], bounded = value;
    if (b->clip > 0) {
        double old = (double)b->values[token];
        bounded = fmin(fmax(value, old - b->clip), old + b->clip);
    }
    double off = value - aim, bounded_off = bounded - aim;
    bool clipped = bounded_off * bounded_off > off * off;
    sums->clipped += clipped;
    sums->loss += share * 0.5 * (clipped ? bounded_off * bounded_off : off * off);
    return clipped ? 0 : share * off;
}
