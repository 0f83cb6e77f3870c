/* lease.h - leases, by which processes take turns with something that they share, such as a GPU.
 *
 * A lease is a name that one session holds at a time. The coordinator grants it in the order of the
 * requests. When the holder's process dies, the kernel closes its connection, and the coordinator
 * grants the lease to the next session at once. Since 0.1.
 */
#ifndef DRAY_LEASE_H
#define DRAY_LEASE_H

#include <dray/dray.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct dray_lease dray_lease;

#define DRAY_LEASE_NAMES 64

typedef struct dray_lease_options {
    size_t size;
    int64_t timeout_ns; /* how long to wait for the lease */
    /* A holder that does not call dray_lease_check for this long while others wait loses the lease.
     * 0: the session holds the lease as long as it lives, even if its process hangs. */
    int64_t term_ns;
} dray_lease_options;

#define DRAY_LEASE_OPTIONS_INIT                                                                    \
    {                                                                                              \
        sizeof(dray_lease_options), DRAY_WAIT_DEFAULT, 0                                           \
    }

/* Takes all of the names at once, when they are free and no earlier request waits for one of them.
 * A request for several names holds none of them while it waits, so that the order of names makes
 * no difference. names: `count` different names, 1 to DRAY_LEASE_NAMES, each 1 to 256 bytes of
 * UTF-8 without control characters. A session with the token of a role may take names that begin
 * with its role, or with a list of roles that has it, and a slash: "engine/x", "engine+trainer/x".
 * Sessions over the Unix socket or with the master token may take any name. options: NULL for the
 * defaults. *out is the caller's, to be ended with dray_lease_release. DRAY_ETIMEDOUT: another
 * session holds a name; the message says which. DRAY_EBUSY: this session holds one of the names or
 * waits for it. DRAY_EPERM: the token does not allow a name. DRAY_EFULL: the limit of the token is
 * reached (`dray serve --limits`). DRAY_EINVALID, DRAY_ECLOSED. Threads: any. Blocks up to the
 * timeout. */
int dray_lease_acquire(dray_context *context, const char *const *names, uint32_t count,
                       const dray_lease_options *options, dray_lease **out, dray_error *error);

/* Returns the lease's number, which is greater than the numbers of all earlier leases of its names.
 * A shared resource can refuse a smaller number than it has seen: that of a process which was
 * stopped and does not know yet that it lost the lease. Does not block. */
uint64_t dray_lease_number(const dray_lease *lease);

/* Asks the coordinator whether the session still holds the lease, and renews its term. *waiting
 * gets the number of sessions that wait for it; waiting may be NULL. After the coordinator was
 * started again, the call takes a lease without a term back, unless another session was first.
 * DRAY_ESTALE: the lease is lost; it was lost after the last check. DRAY_ECLOSED, DRAY_ETIMEDOUT:
 * the coordinator does not answer. Blocks for one answer. */
int dray_lease_check(dray_lease *lease, uint32_t *waiting, dray_error *error);

/* Gives the lease back and frees it, also where it returns an error. NULL is fine. DRAY_ESTALE: the
 * lease was lost before; other errors as of dray_lease_check. Blocks for one answer. */
int dray_lease_release(dray_lease *lease, dray_error *error);

#ifdef __cplusplus
}
#endif
#endif
