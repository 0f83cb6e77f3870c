/* dray/lease.h: the holder's end of a lease. A held lease has a connection of its own and is held
 * as long as it exists. Before and after, the connection belongs to the context. */
#include "base/clock.h"
#include "base/error.h"
#include "base/options.h"
#include "control/context.h"
#include "control/messages.h"

#include <dray/lease.h>
#include <stdlib.h>
#include <string.h>

struct dray_lease {
    dray_context *context;
    dray__channel *channel;
    uint64_t number;
    /* returned is true when the lease came back after a coordinator's restart. */
    bool has_term, returned;
    uint32_t count;
    char *names[DRAY_LEASE_NAMES];
};

static void lease_free(dray_lease *lease)
{
    for (uint32_t i = 0; i < lease->count; i++)
        free(lease->names[i]);
    free(lease);
}

static dray_lease *lease_new(dray_context *context, const char *const *names, uint32_t count)
{
    dray_lease *lease = calloc(1, sizeof *lease);
    bool whole = lease != NULL;
    if (lease)
        lease->context = context;
    while (whole && lease->count < count) {
        lease->names[lease->count] = strdup(names[lease->count]);
        whole = lease->names[lease->count] != NULL;
        lease->count += whole;
    }
    if (!whole && lease)
        lease_free(lease);
    return whole ? lease : NULL;
}

/* Tries once to take the lease. A connection over which no answer came is closed, so that nothing
 * is held over it. */
static int take(dray_lease *lease, int64_t term_ns, int64_t deadline_ns, dray_error *error)
{
    int64_t until = dray__answer_deadline(deadline_ns);
    dray__channel *channel;
    int status = dray__context_borrow(lease->context, until, &channel, error);
    if (status)
        return status;
    int64_t left = deadline_ns - dray__now();
    const dray__lease_wish wish = {(const char *const *)lease->names, lease->count,
                                   left > 0 ? left : 0, term_ns};
    status = dray__ask(channel, DRAY__MSG_LEASE_TAKE, &dray__lease_wish_fields, &wish, until, NULL,
                       &dray__u64_fields, &lease->number, error);
    if (status)
        dray__channel_close(channel);
    else
        lease->channel = channel;
    return status;
}

int dray_lease_acquire(dray_context *context, const char *const *names, uint32_t count,
                       const dray_lease_options *given, dray_lease **out, dray_error *error)
{
    dray_lease_options options = DRAY_LEASE_OPTIONS_INIT;
    int status = DRAY__OPTIONS_READ(dray_lease_options, term_ns, &options, given, error);
    if (status)
        return status;
    if (!names || !count || count > DRAY_LEASE_NAMES || options.timeout_ns < DRAY_WAIT_DEFAULT)
        return dray__fail(
            error, DRAY_EINVALID,
            "dray_lease_acquire: expected 1 to %d names and a timeout, found %u names",
            DRAY_LEASE_NAMES, count);
    int64_t deadline_ns = dray__context_deadline(context, options.timeout_ns);
    dray_lease *lease = lease_new(context, names, count);
    if (!lease)
        return dray__nomem(error);
    lease->has_term = options.term_ns != 0;
    do
        status = take(lease, options.term_ns, deadline_ns, error);
    while (status == DRAY_ECLOSED && dray__context_takes_back(context) &&
           !dray__context_ended(context) && dray__now() < deadline_ns);
    if (status)
        lease_free(lease);
    else
        *out = lease;
    return status;
}

uint64_t dray_lease_number(const dray_lease *lease)
{
    return lease->number;
}

static int ask(dray_lease *lease, uint16_t type, uint32_t *waiting, dray_error *error)
{
    int64_t deadline_ns = dray__context_deadline(lease->context, DRAY_WAIT_DEFAULT);
    const dray__lease_held held = {lease->number, lease->returned,
                                   (const char *const *)lease->names, lease->count};
    return dray__ask(lease->channel, type,
                     type == DRAY__MSG_LEASE_CHECK ? &dray__lease_held_fields : &dray__u64_fields,
                     &held, deadline_ns, NULL, waiting ? &dray__u32_fields : NULL, waiting, error);
}

/* Takes the lease again after the coordinator was killed, if the next one knows this member. It
 * succeeds unless another member has it. */
static int come_back(dray_lease *lease, dray_error *error)
{
    dray__channel *channel;
    int64_t deadline_ns = dray__context_deadline(lease->context, DRAY_WAIT_DEFAULT);
    int status = dray__channel_open_until(lease->context, deadline_ns, &channel, error);
    if (status)
        return status;
    dray__channel_close(lease->channel);
    lease->channel = channel;
    lease->returned = !lease->has_term;
    return DRAY_OK;
}

int dray_lease_check(dray_lease *lease, uint32_t *waiting, dray_error *error)
{
    uint32_t count = 0;
    int status = ask(lease, DRAY__MSG_LEASE_CHECK, &count, error);
    if (status == DRAY_ECLOSED && dray__context_takes_back(lease->context) &&
        !dray__context_ended(lease->context)) {
        status = come_back(lease, error);
        if (!status)
            status = ask(lease, DRAY__MSG_LEASE_CHECK, &count, error);
    }
    if (!status && waiting)
        *waiting = count;
    return status;
}

int dray_lease_release(dray_lease *lease, dray_error *error)
{
    if (!lease)
        return DRAY_OK;
    int status = ask(lease, DRAY__MSG_LEASE_GIVE, NULL, error);
    if (status == DRAY_ECLOSED) {
        status = dray_lease_check(lease, NULL, error);
        if (!status)
            status = ask(lease, DRAY__MSG_LEASE_GIVE, NULL, error);
    }
    if (status && status != DRAY_ESTALE)
        dray__channel_close(lease->channel);
    else
        dray__context_return(lease->context, lease->channel);
    lease_free(lease);
    return status;
}

/* Releases the lease. If the message cannot be sent, the lease ends with its connection. */
void dray__lease_let_go(dray_lease *lease)
{
    if (!lease)
        return;
    dray__writer w = {0};
    dray__put_u64(&w, lease->number);
    if (dray__notify(lease->channel, DRAY__MSG_LEASE_GIVE, &w, NULL))
        dray__channel_close(lease->channel);
    else
        dray__context_return(lease->context, lease->channel);
    dray__writer_free(&w);
    lease_free(lease);
}
