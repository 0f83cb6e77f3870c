/* A publisher that waits until groups have committed a version. */
#include "base/clock.h"
#include "base/error.h"
#include "control/protocol.h"
#include "weights/publisher.h"

#include <inttypes.h>

static int check(const dray_publisher *p, const char *const *groups, uint32_t count,
                 int64_t timeout_ns, dray_error *error)
{
    if (!p || !count || (timeout_ns < 0 && timeout_ns != DRAY_WAIT_DEFAULT))
        return dray__fail(error, DRAY_EINVALID,
                          "a publisher, at least one group and a timeout that is not negative "
                          "expected, found %" PRIu32 " groups, timeout %" PRId64,
                          count, timeout_ns);
    for (uint32_t i = 0; groups && i < count; i++)
        if (!groups[i] || !groups[i][0])
            return dray__fail(error, DRAY_EINVALID, "group %" PRIu32 " of %" PRIu32 " has no name",
                              i, count);
    return DRAY_OK;
}

static int ask(dray_publisher *p, uint64_t version, const char *const *groups, uint32_t count,
               int64_t deadline, dray_error *error)
{
    int64_t left = deadline - dray__now();
    dray__writer w = {0};
    dray__put_u64(&w, p->key);
    dray__put_u64(&w, version);
    dray__put_u32(&w, count);
    dray__put_u32(&w, groups ? count : 0);
    for (uint32_t i = 0; groups && i < count; i++)
        dray__put_string(&w, groups[i]);
    dray__put_i64(&w, left > 0 ? left : 0);
    int rc = dray__call(p->channel, DRAY__MSG_PUBLISHER_DELIVER, &w, NULL, 0,
                        dray__answer_deadline(deadline), NULL, error);
    dray__writer_free(&w);
    return rc;
}

int dray_publisher_deliver(dray_publisher *p, uint64_t version, const char *const *groups,
                           uint32_t count, int64_t timeout_ns, dray_error *error)
{
    int rc = check(p, groups, count, timeout_ns, error);
    if (rc == DRAY_OK)
        rc = dray__gate_join(&p->gate, error);
    if (rc == DRAY_OK)
        rc = dray__publisher_check(p, version, error);
    if (rc)
        return rc;
    int64_t deadline = dray__publisher_deadline(p, timeout_ns);
    do {
        rc = dray__publisher_ensure(p, dray__answer_deadline(deadline), error);
        if (rc == DRAY_OK)
            rc = ask(p, version, groups, count, deadline, error);
    } while (dray__publisher_again(p, rc, deadline));
    return rc;
}
