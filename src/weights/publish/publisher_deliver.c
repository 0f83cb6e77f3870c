/* A publisher that waits until groups have committed a version. */
#include "base/clock.h"
#include "base/error.h"
#include "control/protocol.h"
#include "weights/publish/publisher.h"

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
    const dray__delivering message = {.key = p->key,
                                      .version = version,
                                      .count = count,
                                      .names = groups,
                                      .name_count = groups ? count : 0,
                                      .timeout_ns = (int64_t)dray__left(deadline)};
    return dray__ask(p->channel, DRAY__MSG_PUBLISHER_DELIVER, &dray__delivering_fields, &message,
                     dray__answer_deadline(deadline), NULL, NULL, NULL, error);
}

int dray_publisher_deliver(dray_publisher *p, uint64_t version, const char *const *groups,
                           uint32_t count, int64_t timeout_ns, dray_error *error)
{
    int rc = check(p, groups, count, timeout_ns, error);
    if (rc == DRAY_OK)
        rc = dray__publisher_check(p, version, timeout_ns, error);
    if (rc)
        return rc;
    int64_t deadline = dray__publisher_deadline(p, timeout_ns);
    rc = dray__publisher_sums_wait(p, dray__answer_deadline(deadline), error);
    if (rc)
        return rc;
    do {
        rc = dray__publisher_ensure(p, dray__answer_deadline(deadline), error);
        if (rc == DRAY_OK)
            rc = ask(p, version, groups, count, deadline, error);
    } while (dray__publisher_again(p, rc, deadline));
    return rc;
}
