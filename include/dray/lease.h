/* lease.h - leases: processes that share something, a GPU or a core, take turns with it.
 *
 * A lease is a name that one session at a time holds. The coordinator gives it to who asked first.
 * It ends with its holder: when the process dies, the kernel closes its connection, and the next
 * one has its turn at once.
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
    int64_t timeout_ns; /* how long to wait for the turn */
    /* A holder that has not called dray_lease_check for so long, while others wait, is silent (it
     * was stopped, or hangs): the lease goes to the next one. 0: it is kept as long as the session
     * lives, whatever its process does. */
    int64_t term_ns;
} dray_lease_options;

#define DRAY_LEASE_OPTIONS_INIT                                                                    \
    {                                                                                              \
        sizeof(dray_lease_options), DRAY_WAIT_DEFAULT, 0                                           \
    }

/* Waits until all of the names (1 to DRAY_LEASE_NAMES of 1 to 256 bytes of UTF-8 without control
 * characters, none twice) are free, and nobody who came before waits for one of them; then holds
 * them all. Who waits for several holds none of them meanwhile, so that an order of the names makes
 * no difference. A session that shows the token of a role may take names that begin with its role
 * and a slash, or with a list that has it: "engine/x", "engine+trainer/x"; over the Unix socket,
 * and with the master token, any. options: NULL for the defaults. *out: the caller's, to be ended
 * with dray_lease_release. DRAY_ETIMEDOUT says who holds it; DRAY_EBUSY: this session holds one of
 * the names, or waits for it; DRAY_EPERM: names that are not its token's; DRAY_EFULL: its token's
 * limit (`dray serve --limits`); DRAY_EINVALID; DRAY_ECLOSED. Threads: any. Blocks up to the
 * timeout. */
int dray_lease_acquire(dray_context *context, const char *const *names, uint32_t count,
                       const dray_lease_options *options, dray_lease **out, dray_error *error);

/* Of this turn: greater than that of any turn before it with a name of it. What is shared can
 * refuse who comes with a smaller one than it has seen: a holder that was stopped, and does not
 * know yet that another one has its turn. */
uint64_t dray_lease_number(const dray_lease *lease);

/* Is it still held? Its term begins anew. *waiting (may be NULL): how many wait for it. A
 * coordinator that was killed and started again takes the lease back here where it has no term and
 * nobody else was sooner. DRAY_ESTALE: it is lost, and was since some moment after the last check;
 * DRAY_ECLOSED, DRAY_ETIMEDOUT: the coordinator does not answer, and nobody knows. Blocks for an
 * answer. */
int dray_lease_check(dray_lease *lease, uint32_t *waiting, dray_error *error);

/* Gives it back, and frees it, whatever is returned. NULL is fine. DRAY_ESTALE: it had been lost
 * before; others as dray_lease_check. Blocks for an answer. */
int dray_lease_release(dray_lease *lease, dray_error *error);

#ifdef __cplusplus
}
#endif
#endif
