#include "queue/segment.h"

#include "base/clock.h"
#include "base/error.h"
#include "base/idmap.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010 /* Linux 5.1 */
#endif

enum { SEALS = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE };

int dray__segment_new(uint64_t bytes, void **base, int *fd, dray_error *error)
{
    int memory = memfd_create("dray-samples", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (memory < 0)
        return dray__fail_errno(error, errno, "memfd_create");
    void *at = MAP_FAILED;
    if (ftruncate(memory, (off_t)bytes) == 0)
        at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, memory, 0);
    /* Mapped first: the seal forbids every later writable mapping, also ours. */
    if (at == MAP_FAILED || madvise(at, bytes, MADV_DONTFORK) < 0 ||
        fcntl(memory, F_ADD_SEALS, SEALS | F_SEAL_SEAL) < 0) {
        int rc = dray__fail_errno(error, errno, "a chunk of %llu bytes of shared memory",
                                  (unsigned long long)bytes);
        if (at != MAP_FAILED)
            munmap(at, bytes);
        close(memory);
        return rc;
    }
    *base = at;
    *fd = memory;
    return DRAY_OK;
}

int dray__segment_check(int fd, uint64_t bytes, dray_error *error)
{
    struct stat st;
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || (seals & SEALS) != SEALS)
        return dray__fail(error, DRAY_EINVALID,
                          "chunk: a memfd sealed against shrinking, growing and writing expected, "
                          "found seals %x",
                          seals < 0 ? 0u : (unsigned)seals);
    if (fstat(fd, &st) < 0)
        return dray__fail_errno(error, errno, "fstat of a chunk");
    if (st.st_size < 0 || (uint64_t)st.st_size < bytes || !bytes)
        return dray__fail(error, DRAY_EINVALID, "chunk: %llu bytes expected, found %lld",
                          (unsigned long long)bytes, (long long)st.st_size);
    return DRAY_OK;
}

/* ---- the keeper ------------------------------------------------------------------------------ */

int dray__keeper_link_init(dray__keeper_link *link, const char *path, int64_t timeout_ns,
                           dray_error *error)
{
    *link = (dray__keeper_link){.timeout_ns = timeout_ns};
    if (path && asprintf(&link->address, "unix:%s", path) < 0) {
        link->address = NULL;
        return dray__nomem(error);
    }
    return DRAY_OK;
}

void dray__keeper_link_free(dray__keeper_link *link)
{
    dray__channel_close(link->channel);
    free(link->address);
    *link = (dray__keeper_link){0};
}

void dray__keeper_link_break(dray__keeper_link *link)
{
    dray__channel_close(link->channel);
    link->channel = NULL;
}

static int call_once(dray__keeper_link *link, uint16_t type, dray__writer *message, const int *fd,
                     dray__reply *reply, dray_error *error)
{
    if (!link->address)
        return dray__fail(error, DRAY_EUNSUPPORTED,
                          "samples lie in shared memory, but the coordinator named no keeper that "
                          "holds it on this host");
    if (link->channel && dray__channel_broken(link->channel)) {
        dray__channel_close(link->channel);
        link->channel = NULL;
    }
    int64_t deadline = dray__deadline(link->timeout_ns);
    int rc = DRAY_OK;
    if (!link->channel) /* it was there before the coordinator named it: no long wait */
        rc = dray__channel_connect(link->address, dray__deadline(DRAY__SECOND / 2), &link->channel,
                                   error);
    if (!rc)
        rc = dray__call(link->channel, type, message, fd, fd ? 1 : 0, deadline, reply, error);
    if (rc)
        return dray__fail_prefix(error, rc, "the keeper of samples at %s: ", link->address);
    return DRAY_OK;
}

/* The keeper may have another life since it was asked last: then it is asked again. */
static int call(dray__keeper_link *link, uint16_t type, dray__writer *message, const int *fd,
                dray__reply *reply, dray_error *error)
{
    bool old = link->channel != NULL;
    dray__writer again = {0};
    if (old)
        dray__put_bytes(&again, message->data, message->size);
    int rc = call_once(link, type, message, fd, reply, error);
    if (rc == DRAY_ECLOSED && old && !again.failed) {
        dray__keeper_link_break(link);
        rc = call_once(link, type, &again, fd, reply, error);
        if (rc == DRAY_EEXIST && type == DRAY__MSG_KEEPER_PUT) /* that much had got there */
            rc = DRAY_OK;
    }
    dray__writer_free(&again);
    return rc;
}

int dray__keeper_put(dray__keeper_link *link, uint64_t id, uint64_t key, uint64_t bytes, int fd,
                     dray_error *error)
{
    dray__writer message = {0};
    dray__reply reply;
    dray__put_u64(&message, id);
    dray__put_u64(&message, key);
    dray__put_u64(&message, bytes);
    dray__put_u64(&message, link->era);
    int rc = call(link, DRAY__MSG_KEEPER_PUT, &message, &fd, &reply, error);
    dray__writer_free(&message);
    return rc;
}

int dray__keeper_forget(dray__keeper_link *link, uint32_t count, const dray__writer *pairs,
                        dray_error *error)
{
    dray__writer message = {0};
    dray__reply reply;
    dray__put_u32(&message, count);
    dray__put_bytes(&message, pairs->data, pairs->size);
    int rc = call(link, DRAY__MSG_KEEPER_DROP, &message, NULL, &reply, error);
    dray__writer_free(&message);
    return rc;
}

int dray__keeper_reset(dray__keeper_link *link, dray_error *error)
{
    dray__writer message = {0};
    dray__reply reply;
    dray__put_u64(&message, link->era);
    int rc = call(link, DRAY__MSG_KEEPER_RESET, &message, NULL, &reply, error);
    dray__writer_free(&message);
    return rc;
}

static int get(dray__keeper_link *link, uint64_t id, int *fd, uint64_t *bytes, dray_error *error)
{
    dray__writer message = {0};
    dray__reply reply;
    dray__put_u64(&message, id);
    int rc = call(link, DRAY__MSG_KEEPER_GET, &message, NULL, &reply, error);
    dray__writer_free(&message);
    if (rc)
        return rc;
    *bytes = dray__get_u64(&reply.payload);
    rc = dray__reader_finish(&reply.payload, "KEEPER_GET", error);
    if (!rc && reply.fd_count != 1)
        rc = dray__fail(error, DRAY_EPROTO, "KEEPER_GET: one descriptor expected, found %u",
                        reply.fd_count);
    if (!rc)
        rc = dray__segment_check(reply.fds[0], *bytes, error);
    for (uint32_t i = rc ? 0 : 1; i < reply.fd_count; i++)
        close(reply.fds[i]);
    *fd = reply.fds[0];
    return rc;
}

/* ---- this process's mappings ----------------------------------------------------------------- */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static dray__idmap mappings;

static void unmap(dray__mapping *mapping)
{
    munmap(mapping->base, mapping->size);
    free(mapping);
}

static dray__mapping *find(uint64_t id)
{
    pthread_mutex_lock(&lock);
    dray__mapping *mapping = dray__idmap_get(&mappings, id);
    if (mapping)
        mapping->users++;
    pthread_mutex_unlock(&lock);
    return mapping;
}

/* Whoever was faster wins. */
static dray__mapping *publish(dray__mapping *mapping)
{
    pthread_mutex_lock(&lock);
    dray__mapping *there = dray__idmap_get(&mappings, mapping->id);
    if (!there && dray__idmap_set(&mappings, mapping->id, mapping))
        there = mapping;
    if (there)
        there->users++;
    pthread_mutex_unlock(&lock);
    if (there != mapping)
        unmap(mapping);
    return there;
}

int dray__mapping_get(dray__keeper_link *link, uint64_t id, dray__mapping **out, dray_error *error)
{
    *out = find(id);
    if (*out)
        return DRAY_OK;
    int fd;
    uint64_t bytes;
    int rc = get(link, id, &fd, &bytes, error);
    if (rc)
        return rc;
    dray__mapping *mapping = malloc(sizeof *mapping);
    void *base = MAP_FAILED;
    if (mapping)
        base = mmap(NULL, bytes, PROT_READ, MAP_SHARED | MAP_POPULATE, fd, 0);
    int errnum = errno;
    close(fd);
    if (base == MAP_FAILED) {
        free(mapping);
        return dray__fail_errno(error, mapping ? errnum : ENOMEM,
                                "mapping a chunk of %llu bytes for reading",
                                (unsigned long long)bytes);
    }
    *mapping = (dray__mapping){.id = id, .base = base, .size = bytes};
    *out = publish(mapping);
    return *out ? DRAY_OK : dray__nomem(error);
}

void dray__mapping_put(dray__mapping *mapping)
{
    pthread_mutex_lock(&lock);
    bool last = --mapping->users == 0 && mapping->dropped;
    pthread_mutex_unlock(&lock);
    if (last)
        unmap(mapping);
}

void dray__mapping_drop(uint64_t id)
{
    pthread_mutex_lock(&lock);
    dray__mapping *mapping = dray__idmap_remove(&mappings, id);
    if (mapping)
        mapping->dropped = 1;
    bool unused = mapping && mapping->users == 0;
    pthread_mutex_unlock(&lock);
    if (unused)
        unmap(mapping);
}

void dray__mapping_drop_unused(void)
{
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < mappings.capacity; i++) {
        dray__mapping *mapping = mappings.entries[i].key ? mappings.entries[i].value : NULL;
        if (!mapping || mapping->users)
            continue;
        unmap(dray__idmap_remove(&mappings, mapping->id));
        i--; /* what probed past the entry has moved, and may lie here now */
    }
    pthread_mutex_unlock(&lock);
}
