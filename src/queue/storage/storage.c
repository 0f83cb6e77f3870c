#include "queue/storage/storage.h"

#include "base/clock.h"
#include "base/error.h"
#include "base/hash.h"
#include "queue/messages.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/random.h>
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
    /* It is mapped first, because the seal forbids every later writable mapping. */
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

static int ask_once(dray__keeper_link *link, uint16_t type, dray__writer *message, const int *fd,
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
    if (!link->channel) /* the keeper is running already: no long wait is needed */
        rc = dray__channel_connect(link->address, dray__deadline(DRAY__SECOND / 2), &link->channel,
                                   error);
    if (!rc)
        rc = dray__call(link->channel, type, message, fd, fd ? 1 : 0, deadline, reply, error);
    if (rc)
        return dray__fail_prefix(error, rc, "the keeper of samples at %s: ", link->address);
    return DRAY_OK;
}

/* Calls the keeper, and calls again when it was restarted since the last call. */
static int call(dray__keeper_link *link, uint16_t type, dray__writer *message, const int *fd,
                dray__reply *reply, dray_error *error)
{
    bool old = link->channel != NULL;
    dray__writer again = {0};
    if (old)
        dray__put_bytes(&again, message->data, message->size);
    int rc = ask_once(link, type, message, fd, reply, error);
    if (rc == DRAY_ECLOSED && old && !again.failed) {
        dray__keeper_link_break(link);
        rc = ask_once(link, type, &again, fd, reply, error);
        if (rc == DRAY_EEXIST && type == DRAY__MSG_KEEPER_PUT) /* the first call had succeeded */
            rc = DRAY_OK;
    }
    dray__writer_free(&again);
    return rc;
}

static int tell(dray__keeper_link *link, uint16_t type, const dray__fields *of, const void *message,
                const int *fd, dray_error *error)
{
    dray__writer w = {0};
    dray__reply reply;
    dray__put_fields(&w, of, message);
    int rc = call(link, type, &w, fd, &reply, error);
    dray__writer_free(&w);
    return rc;
}

int dray__keeper_put(dray__keeper_link *link, uint64_t id, uint64_t key, uint64_t bytes, int fd,
                     dray_error *error)
{
    return tell(link, DRAY__MSG_KEEPER_PUT, &dray__keeping_fields,
                &(dray__keeping){id, key, bytes, link->era}, &fd, error);
}

int dray__keeper_forget(dray__keeper_link *link, const dray__chunk_key *chunks, uint32_t count,
                        dray_error *error)
{
    return tell(link, DRAY__MSG_KEEPER_DROP, &dray__chunk_keys_fields,
                &(dray__chunk_keys){chunks, count}, NULL, error);
}

int dray__keeper_reset(dray__keeper_link *link, dray_error *error)
{
    return tell(link, DRAY__MSG_KEEPER_RESET, &dray__u64_fields, &link->era, NULL, error);
}

static int get(dray__keeper_link *link, uint64_t id, int *fd, uint64_t *bytes, dray_error *error)
{
    dray__writer message = {0};
    dray__reply reply;
    dray__put_fields(&message, &dray__u64_fields, &id);
    int rc = call(link, DRAY__MSG_KEEPER_GET, &message, NULL, &reply, error);
    dray__writer_free(&message);
    if (rc)
        return rc;
    dray__get_fields(&reply.payload, NULL, &dray__u64_fields, bytes);
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

int dray__keeper_has(dray__keeper_link *link, uint64_t id, dray_error *error)
{
    int fd;
    uint64_t bytes;
    int rc = get(link, id, &fd, &bytes, error);
    if (!rc)
        close(fd);
    return rc;
}

/* ---- this process's mappings ----------------------------------------------------------------- */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static dray__idmap mappings;
static uint32_t kept_fds;

enum { KEPT_FDS_MAX = 64 }; /* the usual limit of a process is 1024 */

static void mapping_end(dray__mapping *mapping)
{
    munmap(mapping->base, mapping->size);
    if (mapping->fd >= 0) {
        close(mapping->fd);
        __atomic_fetch_sub(&kept_fds, 1, __ATOMIC_RELAXED);
    }
    free(mapping);
}

static dray__mapping *find_mapping(uint64_t id)
{
    pthread_mutex_lock(&lock);
    dray__mapping *mapping = dray__idmap_get(&mappings, id);
    if (mapping)
        mapping->users++;
    pthread_mutex_unlock(&lock);
    return mapping;
}

/* Adds a mapping. When another thread mapped the same chunk first, returns that one's mapping. */
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
        mapping_end(mapping);
    return there;
}

int dray__mapping_get(dray__keeper_link *link, uint64_t id, dray__mapping **out, dray_error *error)
{
    *out = find_mapping(id);
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
    *mapping = (dray__mapping){.id = id, .base = base, .size = bytes, .fd = -1};
    *out = publish(mapping);
    return *out ? DRAY_OK : dray__nomem(error);
}

void dray__mapping_put(dray__mapping *mapping)
{
    pthread_mutex_lock(&lock);
    bool last = --mapping->users == 0 && mapping->dropped;
    pthread_mutex_unlock(&lock);
    if (last)
        mapping_end(mapping);
}

int dray__mapping_fd(dray__keeper_link *link, dray__mapping *mapping, int *fd, dray_error *error)
{
    *fd = __atomic_load_n(&mapping->fd, __ATOMIC_ACQUIRE);
    if (*fd >= 0)
        return DRAY_OK;
    uint64_t bytes;
    int rc = get(link, mapping->id, fd, &bytes, error);
    if (rc)
        return rc;
    if (bytes != mapping->size) {
        close(*fd);
        return dray__fail(error, DRAY_EPROTO, "chunk %016llx: %llu bytes expected, found %llu",
                          (unsigned long long)mapping->id, (unsigned long long)mapping->size,
                          (unsigned long long)bytes);
    }
    pthread_mutex_lock(&lock);
    if (mapping->fd < 0 && __atomic_load_n(&kept_fds, __ATOMIC_RELAXED) < KEPT_FDS_MAX) {
        __atomic_store_n(&mapping->fd, *fd, __ATOMIC_RELEASE);
        __atomic_fetch_add(&kept_fds, 1, __ATOMIC_RELAXED);
    }
    pthread_mutex_unlock(&lock);
    return DRAY_OK;
}

void dray__mapping_fd_put(const dray__mapping *mapping, int fd)
{
    if (fd != __atomic_load_n(&mapping->fd, __ATOMIC_ACQUIRE))
        close(fd);
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
        mapping_end(mapping);
}

void dray__mapping_drop_unused(void)
{
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < mappings.capacity; i++) {
        dray__mapping *mapping = mappings.entries[i].key ? mappings.entries[i].value : NULL;
        if (!mapping || mapping->users)
            continue;
        mapping_end(dray__idmap_remove(&mappings, mapping->id));
        i--; /* an entry that was probed past this one has moved, and may be here now */
    }
    pthread_mutex_unlock(&lock);
}

/* ---- chunks that this process writes --------------------------------------------------------- */

#define CHUNK_LEAST (UINT64_C(64) << 10) /* where the capacity is small */
#define CHUNK_MIN (UINT64_C(4) << 20)
#define CHUNK_MAX (UINT64_C(64) << 20)

static dray__written **find(dray__storage *storage, uint64_t id)
{
    dray__written **at = &storage->chunks;
    while (*at && (*at)->id != id)
        at = &(*at)->next;
    return at;
}

/* Returns a size of a small part of the capacity, because many producers may each have a chunk that
 * is not full. */
static uint64_t part_of(uint64_t capacity, uint64_t parts)
{
    uint64_t size = CHUNK_LEAST;
    while (size < CHUNK_MAX && size * 2 <= capacity / parts)
        size *= 2;
    return size;
}

static void close_if_done(dray__storage *storage, dray__written *chunk)
{
    if (chunk == storage->current || chunk->pending)
        return;
    chunk->state = DRAY__WRITTEN_CLOSED;
    chunk->told = 0;
}

static void set_current(dray__storage *storage, dray__written *chunk)
{
    dray__written *old = storage->current;
    storage->current = chunk;
    if (old) {
        old->state = DRAY__WRITTEN_FULL;
        close_if_done(storage, old);
    }
    if (!chunk)
        return;
    chunk->state = DRAY__WRITTEN_CURRENT;
    chunk->used = 0;
    chunk->kept = false;
}

bool dray__storage_take(dray__storage *storage, uint64_t bytes, dray__storage_room *out)
{
    dray__written *chunk = storage->current;
    uint64_t room = dray__round_up(bytes, DRAY__ALIGN);
    if (!chunk || room > chunk->size - chunk->used)
        return false;
    *out = (dray__storage_room){
        .chunk = chunk, .offset = chunk->used, .at = chunk->base + chunk->used};
    chunk->used += room;
    chunk->pending++;
    return true;
}

void dray__storage_set_aside(dray__storage *storage)
{
    set_current(storage, NULL);
}

bool dray__storage_reuse(dray__storage *storage, uint64_t id)
{
    dray__written *chunk = *find(storage, id);
    if (!chunk || chunk->state != DRAY__WRITTEN_CLOSED)
        return false;
    set_current(storage, chunk);
    return true;
}

/* Computes how many of the next columns to put into one chunk, and their bytes. */
static uint64_t next_bytes(const dray__storage *storage, const uint64_t *rooms, uint32_t count,
                           uint32_t *taken)
{
    uint64_t most = part_of(storage->capacity, 16), bytes = 0;
    for (*taken = 0; *taken < count; ++*taken) {
        uint64_t room = dray__round_up(rooms[*taken], DRAY__ALIGN);
        if (*taken && (room > most || bytes > most - room))
            break;
        bytes += room;
    }
    return bytes;
}

/* A producer of many bytes gets larger chunks. There are only few sizes, so that chunks can be used
 * again. */
void dray__storage_size(const dray__storage *storage, uint64_t bytes, uint64_t *least,
                        uint64_t *size)
{
    uint32_t taken;
    uint64_t most = part_of(storage->capacity, 64), standard = most < CHUNK_MIN ? most : CHUNK_MIN;
    *least = next_bytes(storage, storage->rooms, storage->room_count, &taken);
    *least =
        *least < dray__round_up(bytes, DRAY__ALIGN) ? dray__round_up(bytes, DRAY__ALIGN) : *least;
    while (standard < most && standard < storage->bytes / 8)
        standard *= 2;
    *size = standard;
    while (*size < *least && *size < UINT64_C(1) << 62)
        *size *= 2;
    if (*size > standard && *size - *size / 4 >= *least) /* in quarter steps */
        *size -= *size / 4;
}

int dray__storage_ahead(dray__storage *storage, const uint64_t *rooms, uint32_t count,
                        uint64_t *bytes, dray_error *error)
{
    const dray__written *current = storage->current;
    uint64_t all = 0, left = current ? current->size - current->used : 0;
    uint32_t fits = 0;
    *bytes = 0;
    for (uint32_t i = 0; i < count; i++)
        if (__builtin_add_overflow(all, dray__round_up(rooms[i], DRAY__ALIGN), &all) ||
            all > INT64_MAX)
            return dray__fail(error, DRAY_EINVALID, "column %u: sizes overflow", i);
    for (; fits < count && dray__round_up(rooms[fits], DRAY__ALIGN) <= left; fits++)
        left -= dray__round_up(rooms[fits], DRAY__ALIGN);
    if (fits == count)
        return DRAY_OK;
    if (!fits || all > storage->capacity / 4) { /* the rest of the chunk is too small */
        set_current(storage, NULL);
        fits = 0;
    }
    for (; fits < count; fits++)
        *bytes += dray__round_up(rooms[fits], DRAY__ALIGN);
    *bytes += !*bytes;
    return DRAY_OK;
}

int dray__storage_name(uint64_t *id, uint64_t *key, dray_error *error)
{
    uint64_t random[2] = {0, 0};
    if (getrandom(random, sizeof random, 0) != (ssize_t)sizeof random)
        return dray__fail_errno(error, errno, "getrandom");
    *id = random[0] | 1; /* never 0 */
    *key = random[1];
    return DRAY_OK;
}

int dray__storage_make(uint64_t id, uint64_t key, uint64_t size, dray__written **out, int *fd,
                       dray_error *error)
{
    dray__written *chunk = calloc(1, sizeof *chunk);
    if (!chunk)
        return dray__nomem(error);
    chunk->id = id;
    chunk->key = key;
    chunk->size = size;
    void *base = NULL;
    int rc = dray__segment_new(size, &base, fd, error);
    if (rc) {
        free(chunk);
        return rc;
    }
    chunk->base = base;
    *out = chunk;
    return DRAY_OK;
}

void dray__storage_add(dray__storage *storage, dray__written *chunk)
{
    chunk->next = storage->chunks;
    storage->chunks = chunk;
    storage->count++;
    storage->bytes += chunk->size;
    set_current(storage, chunk);
}

void dray__storage_unmake(dray__written *chunk)
{
    munmap(chunk->base, chunk->size);
    free(chunk);
}

static void unmap(dray__storage *storage, dray__written **at)
{
    dray__written *chunk = *at;
    *at = chunk->next;
    storage->count--;
    storage->bytes -= chunk->size;
    if (storage->pid == getpid()) /* a forked child does not have the mapping */
        munmap(chunk->base, chunk->size);
    free(chunk);
}

void dray__storage_done(dray__storage *storage, const dray__storage_room *span, bool given_up)
{
    dray__written *chunk = span->chunk;
    chunk->pending--;
    chunk->kept |= !given_up;
    if (chunk == storage->current && !chunk->pending && !chunk->kept)
        chunk->used = 0; /* nothing in it was committed */
    else if (chunk == storage->current && !chunk->pending &&
             (chunk->used == chunk->size || chunk->size > part_of(storage->capacity, 16)))
        set_current(storage, NULL); /* a large chunk must not wait for rows that may never come */
    if (chunk->state == DRAY__WRITTEN_FULL)
        close_if_done(storage, chunk);
    if (chunk->state == DRAY__WRITTEN_LOST && !chunk->pending)
        unmap(storage, find(storage, chunk->id));
}

void dray__storage_lose(dray__storage *storage)
{
    storage->current = NULL;
    for (dray__written **at = &storage->chunks; *at;) {
        (*at)->state = DRAY__WRITTEN_LOST;
        if ((*at)->pending)
            at = &(*at)->next;
        else
            unmap(storage, at);
    }
}

void dray__storage_dropped(dray__storage *storage, uint64_t id)
{
    dray__written **at = find(storage, id);
    if (*at && (*at)->state == DRAY__WRITTEN_CLOSED)
        unmap(storage, at);
}

void dray__storage_put_closed(dray__storage *storage, dray__writer *w)
{
    uint32_t count = 0;
    storage->messages++;
    for (const dray__written *chunk = storage->chunks; chunk; chunk = chunk->next)
        count += chunk->state == DRAY__WRITTEN_CLOSED && !chunk->told;
    dray__put_u32(w, count);
    for (dray__written *chunk = storage->chunks; count && chunk; chunk = chunk->next) {
        if (chunk->state != DRAY__WRITTEN_CLOSED || chunk->told)
            continue;
        dray__put_u64(w, chunk->id);
        chunk->told = storage->messages;
    }
}

void dray__storage_untell(dray__storage *storage, bool all)
{
    for (dray__written *chunk = storage->chunks; chunk; chunk = chunk->next)
        if (all || chunk->told == storage->messages)
            chunk->told = 0;
}

bool dray__storage_has_news(const dray__storage *storage)
{
    for (const dray__written *chunk = storage->chunks; chunk; chunk = chunk->next)
        if (chunk->state == DRAY__WRITTEN_CLOSED && !chunk->told)
            return true;
    return false;
}

void dray__storage_free(dray__storage *storage)
{
    while (storage->chunks)
        unmap(storage, &storage->chunks);
    storage->current = NULL;
}
