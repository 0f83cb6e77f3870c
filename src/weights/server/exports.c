/* One-sided reads of a member's regions: how readers get access, and how it is revoked
 * (exports.h). */
#include "weights/server/exports.h"

#include "base/error.h"

#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

struct dray__export {
    struct dray__export *next, **link;
    uint64_t token, attempt;
    pid_t pid; /* a forked child must not unmap its parent's memory */
    bool active, revoked;
    dray__net_memory **memory;
    uint32_t count;
    dray__writer said; /* the answer to readers */
};

/* Guards the list and the exports in it. A connection with an export holds it while it works,
 * because a carrier may emulate one-sided reads, and then the process that is read carries them
 * out. */
static pthread_mutex_t lock;
static dray__export *list;

static void init_lock(void)
{
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_settype(&attributes, PTHREAD_MUTEX_RECURSIVE);
    pthread_mutex_init(&lock, &attributes);
    pthread_mutexattr_destroy(&attributes);
}

/* The fork may have copied the lock while the server's thread held it. */
static void in_child(void)
{
    init_lock();
    list = NULL;
}

static void make_lock(void)
{
    init_lock();
    pthread_atfork(NULL, NULL, in_child);
}

static void acquire(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, make_lock);
    pthread_mutex_lock(&lock);
}

static void unmap(dray__export *e)
{
    for (uint32_t i = 0; i < e->count; i++)
        e->memory[i]->carrier->unmap(e->memory[i]);
    e->count = 0;
}

static int map_region(dray__export *e, dray__stream *stream, const dray_region *region,
                      dray_error *error)
{
    const dray__carrier *carrier = dray__stream_carrier(stream);
    uint8_t *base = dray_region_base(region);
    uint64_t bytes = dray_region_bytes(region);
    dray__put_u64(&e->said, (uint64_t)(uintptr_t)base);
    dray__put_u64(&e->said, bytes);
    if (!base || !bytes) {
        dray__put_blob(&e->said, NULL, 0);
        return DRAY_OK;
    }
    void *key;
    size_t size;
    int rc = carrier->map(stream, base, bytes, true, &e->memory[e->count], error);
    if (rc)
        return rc;
    rc = carrier->pack_key(e->memory[e->count++], &key, &size, error);
    if (rc)
        return rc;
    dray__put_blob(&e->said, key, size);
    free(key);
    return DRAY_OK;
}

static int map_all(dray__export *e, dray__stream *stream, const dray__local *local,
                   dray_error *error)
{
    uint32_t count = dray_layout_region_count(dray__local_layout(local));
    e->memory = calloc((size_t)count + 1, sizeof *e->memory);
    int rc = e->memory ? DRAY_OK : dray__nomem(error);
    dray__put_u32(&e->said, count);
    for (uint32_t i = 0; i < count && rc == DRAY_OK; i++)
        rc = map_region(e, stream, dray__local_region(local, i), error);
    return rc ? rc : dray__writer_check(&e->said, error);
}

static int export_new(dray__stream *stream, uint64_t token, const dray__local *local,
                      dray__export **out, dray_error *error)
{
    dray__export *e = calloc(1, sizeof *e);
    if (!e)
        return dray__nomem(error);
    e->token = token;
    e->pid = getpid();
    e->next = list;
    e->link = &list;
    if (list)
        list->link = &e->next;
    list = e;
    int rc = map_all(e, stream, local, error);
    if (rc)
        dray__export_free(e);
    else
        *out = e;
    return rc;
}

int dray__export_give(dray__export **export, dray__stream *stream, uint64_t token, uint64_t attempt,
                      size_t room, dray__writer *out, dray_error *error)
{
    dray__local *local;
    int rc = dray__local_hold_ticket(token, &local, error);
    if (rc)
        return rc;
    acquire();
    if (*export && ((*export)->token != token || (*export)->revoked)) {
        dray__export_free(*export);
        *export = NULL;
    }
    /* This holds the member, and its access is not revoked yet. A later revocation finds the
     * export in the list. */
    rc = dray__local_check(local, attempt, error);
    dray__local_export(local);
    if (rc == DRAY_OK && !*export)
        rc = export_new(stream, token, local, export, error);
    if (rc == DRAY_OK && (*export)->said.size > room)
        rc = dray__fail(error, DRAY_EUNSUPPORTED, "the keys of its regions have %zu bytes",
                        (*export)->said.size);
    if (rc == DRAY_OK) {
        (*export)->active = true;
        (*export)->attempt = attempt;
        dray__put_bytes(out, (*export)->said.data, (*export)->said.size);
    }
    pthread_mutex_unlock(&lock);
    dray__local_release(local);
    return rc ? rc : dray__writer_check(out, error);
}

void dray__export_done(dray__export *export)
{
    acquire();
    export->active = false;
    pthread_mutex_unlock(&lock);
}

void dray__export_free(dray__export *export)
{
    if (!export)
        return;
    if (export->pid == getpid()) {
        acquire();
        unmap(export);
        *export->link = export->next;
        if (export->next)
            export->next->link = export->link;
        pthread_mutex_unlock(&lock);
    }
    dray__writer_free(&export->said);
    free(export->memory);
    free(export);
}

bool dray__export_enter(const dray__export *export)
{
    acquire();
    if (!export || !export->revoked)
        return true;
    pthread_mutex_unlock(&lock);
    return false;
}

void dray__export_leave(void)
{
    pthread_mutex_unlock(&lock);
}

void dray__exports_revoke(uint64_t token, uint64_t attempt)
{
    acquire();
    for (dray__export *e = list; e; e = e->next)
        if (e->token == token && (attempt == UINT64_MAX || (e->active && e->attempt < attempt))) {
            unmap(e);
            e->revoked = true;
        }
    pthread_mutex_unlock(&lock);
}
