#include "trace/account.h"

#include "trace/spans.h"

#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* One thread writes all numbers, except ended_ns, which another process writes. `sequence` is odd
 * while they change. */
typedef struct sum {
    _Atomic int64_t ns, cpu_ns;
} sum;

struct dray__account {
    _Atomic uint32_t sequence, names;
    _Atomic int64_t ended_ns, first_ns, since_ns;
    /* The running state and its name; -1 for none, or for a name without room. */
    _Atomic int32_t state, name;
    sum states[DRAY__STATES], named[DRAY__ACCOUNT_NAMES];
    char texts[DRAY__ACCOUNT_NAMES][DRAY__ACCOUNT_NAME];
};

_Static_assert(DRAY__ACCOUNT_AT + sizeof(dray__account) <= DRAY__SPANS_HEAD, "the head has room");
_Static_assert(DRAY__SPANS_CLOCK_AT >= 20 + DRAY__SPAN_NAME_MAX, "the label is before them");

const char *dray__cause_name(dray_wait_cause cause)
{
    static const char *const texts[DRAY__WAIT_CAUSES] = {
        [DRAY_CAUSE_UNKNOWN] = "unknown",   [DRAY_CAUSE_SAMPLES] = "samples",
        [DRAY_CAUSE_WEIGHTS] = "weights",   [DRAY_CAUSE_READERS] = "readers",
        [DRAY_CAUSE_RANKS] = "ranks",       [DRAY_CAUSE_ADMISSION] = "admission",
        [DRAY_CAUSE_CAPACITY] = "capacity", [DRAY_CAUSE_TOOL] = "tool",
        [DRAY_CAUSE_RESTART] = "restart",   [DRAY_CAUSE_CONTROLLER] = "controller",
        [DRAY_CAUSE_LEASE] = "lease"};
    return (size_t)cause < DRAY__WAIT_CAUSES ? texts[cause] : texts[DRAY_CAUSE_UNKNOWN];
}

/* ---- writing --------------------------------------------------------------------------------- */

dray__account *dray__account_map(int file)
{
    uint8_t *head = mmap(NULL, DRAY__SPANS_HEAD, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (head == MAP_FAILED)
        return NULL;
    dray__account *account = (dray__account *)(void *)(head + DRAY__ACCOUNT_AT);
    atomic_store(&account->state, -1);
    return account;
}

void dray__account_unmap(dray__account *account)
{
    if (account)
        munmap((uint8_t *)account - DRAY__ACCOUNT_AT, DRAY__SPANS_HEAD);
}

static void add(_Atomic int64_t *to, int64_t what)
{
    int64_t before = atomic_load_explicit(to, memory_order_relaxed);
    atomic_store_explicit(to, before + what, memory_order_relaxed);
}

/* Returns the index of the name, adding it if it is new; -1 when there is no room. */
static int32_t place_of(dray__account *account, const char *name)
{
    uint32_t count = atomic_load_explicit(&account->names, memory_order_relaxed);
    for (uint32_t i = 0; i < count; i++)
        if (strncmp(account->texts[i], name, DRAY__ACCOUNT_NAME - 1) == 0)
            return (int32_t)i;
    if (count == DRAY__ACCOUNT_NAMES)
        return -1;
    snprintf(account->texts[count], DRAY__ACCOUNT_NAME, "%s", name);
    atomic_store_explicit(&account->names, count + 1, memory_order_release);
    return (int32_t)count;
}

void dray__account_switch(dray__account *account, int64_t now, int64_t cpu_ns, int state,
                          const char *name)
{
    if (!account)
        return;
    uint32_t sequence = atomic_load_explicit(&account->sequence, memory_order_relaxed);
    int32_t place = name && state < DRAY__STATE_WAIT ? place_of(account, name) : -1;
    atomic_store_explicit(&account->sequence, sequence + 1, memory_order_relaxed);
    atomic_thread_fence(memory_order_release);
    int32_t was = atomic_load_explicit(&account->state, memory_order_relaxed);
    int32_t was_name = atomic_load_explicit(&account->name, memory_order_relaxed);
    int64_t ns = now - atomic_load_explicit(&account->since_ns, memory_order_relaxed);
    if (was >= 0) {
        add(&account->states[was].ns, ns);
        add(&account->states[was].cpu_ns, cpu_ns);
    }
    if (was >= 0 && was_name >= 0) {
        add(&account->named[was_name].ns, ns);
        add(&account->named[was_name].cpu_ns, cpu_ns);
    }
    if (!atomic_load_explicit(&account->first_ns, memory_order_relaxed))
        atomic_store_explicit(&account->first_ns, now, memory_order_relaxed);
    atomic_store_explicit(&account->since_ns, now, memory_order_relaxed);
    atomic_store_explicit(&account->state, name ? state : -1, memory_order_relaxed);
    atomic_store_explicit(&account->name, place, memory_order_relaxed);
    atomic_store_explicit(&account->sequence, sequence + 2, memory_order_release);
}

void dray__account_restate(dray__account *account, int state)
{
    uint32_t sequence = atomic_load_explicit(&account->sequence, memory_order_relaxed);
    atomic_store_explicit(&account->sequence, sequence + 1, memory_order_relaxed);
    atomic_thread_fence(memory_order_release);
    atomic_store_explicit(&account->state, state, memory_order_relaxed);
    atomic_store_explicit(&account->sequence, sequence + 2, memory_order_release);
}

/* ---- reading --------------------------------------------------------------------------------- */

enum { TRIES = 1000, LABEL_AT = 16 };

/* Reads a consistent head: the sequence is read before and after it. */
static bool read_head(int file, uint8_t head[DRAY__SPANS_HEAD])
{
    const off_t at = DRAY__ACCOUNT_AT + (off_t)offsetof(dray__account, sequence);
    for (int i = 0; i < TRIES; i++) {
        uint32_t before = 1, after = 0;
        if (pread(file, &before, sizeof before, at) != sizeof before ||
            pread(file, head, DRAY__SPANS_HEAD, 0) != DRAY__SPANS_HEAD ||
            pread(file, &after, sizeof after, at) != sizeof after)
            return false;
        if (before == after && before % 2 == 0)
            return true;
    }
    return false;
}

static bool read_label(const uint8_t *head, char *out, size_t capacity)
{
    dray__reader r = dray__reader_of(head, DRAY__ACCOUNT_AT);
    const void *magic = dray__get_bytes(&r, 8);
    bool ours =
        magic && memcmp(magic, "DRAYSPAN", 8) == 0 && dray__get_u32(&r) == DRAY__SPANS_VERSION;
    dray__get_u32(&r);
    size_t size = 0;
    const void *label = ours ? dray__get_blob(&r, &size) : NULL;
    if (!label || r.failed)
        return false;
    snprintf(out, capacity, "%.*s", (int)size, (const char *)label);
    return true;
}

/* Converts a time of the process's clock to this host's; 0 when there was none. */
static int64_t here(int64_t ns, int64_t clock_ns)
{
    return ns ? (int64_t)((uint64_t)ns + (uint64_t)clock_ns) : 0;
}

/* Copies the account's numbers. Numbers of a damaged account count as none. */
static void take(const dray__account *from, int64_t clock_ns, int64_t now, dray__accounted *out)
{
    out->first_ns = here(atomic_load(&from->first_ns), clock_ns);
    out->ended_ns = here(atomic_load(&from->ended_ns), clock_ns);
    if (out->ended_ns && out->ended_ns < now)
        now = out->ended_ns;
    int64_t since = here(atomic_load(&from->since_ns), clock_ns),
            runs = now > since ? now - since : 0;
    int32_t state = atomic_load(&from->state), name = atomic_load(&from->name);
    uint32_t names = atomic_load(&from->names);
    out->state = state;
    out->named_count = names < DRAY__ACCOUNT_NAMES ? names : DRAY__ACCOUNT_NAMES;
    for (int i = 0; i < DRAY__STATES; i++) {
        out->state_ns[i] = atomic_load(&from->states[i].ns) + (i == state ? runs : 0);
        out->cpu_ns += atomic_load(&from->states[i].cpu_ns);
    }
    for (uint32_t i = 0; i < out->named_count; i++) {
        dray__account_sum *to = &out->named[i];
        snprintf(to->name, sizeof to->name, "%.*s", DRAY__ACCOUNT_NAME - 1, from->texts[i]);
        to->ns = atomic_load(&from->named[i].ns) + ((int32_t)i == name ? runs : 0);
        to->cpu_ns = atomic_load(&from->named[i].cpu_ns);
    }
}

bool dray__account_read(const char *path, int64_t now, dray__accounted *out)
{
    _Alignas(dray__account) uint8_t head[DRAY__SPANS_HEAD];
    int file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW);
    if (file < 0)
        return false;
    bool good = read_head(file, head);
    close(file);
    *out = (dray__accounted){.first_ns = 0};
    if (!good || !read_label(head, out->label, sizeof out->label))
        return false;
    int64_t clock_ns;
    memcpy(&clock_ns, head + DRAY__SPANS_CLOCK_AT, sizeof clock_ns);
    take((const dray__account *)(const void *)(head + DRAY__ACCOUNT_AT), clock_ns, now, out);
    return out->first_ns > 0;
}

void dray__account_end(const char *path, int64_t now)
{
    dray__accounted is;
    int file =
        dray__account_read(path, now, &is) ? open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW) : -1;
    if (file < 0)
        return;
    int64_t clock_ns = 0; /* kept as a time of the process's clock */
    off_t at = DRAY__ACCOUNT_AT + (off_t)offsetof(dray__account, ended_ns);
    bool known = pread(file, &clock_ns, sizeof clock_ns, DRAY__SPANS_CLOCK_AT) == sizeof clock_ns;
    now -= known ? clock_ns : 0;
    ssize_t n = is.ended_ns ? 0 : pwrite(file, &now, sizeof now, at);
    (void)n; /* if it cannot be written, the last state goes on counting */
    close(file);
}
