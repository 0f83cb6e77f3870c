#include "queue/storage/own.h"

#include "base/hash.h"

#include <dray/queue.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14 */
#endif

typedef struct own_values {
    uint8_t *base;
    uint64_t size;
    const void *of; /* NULL once all of it was copied */
} own_values;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static dray__idmap all; /* by the address of the values */

/* Copies the pages that are still shared with the chunk, by writing to each (copy on write). Other
 * threads may write to them meanwhile. */
static void copy_in_place(own_values *o)
{
    static volatile uint8_t nothing;
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    if (madvise(o->base, o->size, MADV_POPULATE_WRITE) < 0)
        for (uint64_t at = 0; at < o->size; at += page)
            __atomic_fetch_add(o->base + at, nothing, __ATOMIC_RELAXED);
    o->of = NULL;
}

static void leave(const void *of)
{
    for (size_t i = 0; i < all.capacity; i++) {
        own_values *o = all.entries[i].key ? all.entries[i].value : NULL;
        if (o && o->of && (!of || o->of == of))
            copy_in_place(o);
    }
}

void dray__owned_leave(const void *of)
{
    pthread_mutex_lock(&lock);
    leave(of);
    pthread_mutex_unlock(&lock);
}

/* Before a fork all mappings are copied, because no batch keeps the chunks unchanged for the child.
 */
static void before_fork(void)
{
    pthread_mutex_lock(&lock);
    leave(NULL);
}

static void after_fork(void)
{
    pthread_mutex_unlock(&lock);
}

static bool forks_are_watched;

static void watch_forks(void)
{
    forks_are_watched = pthread_atfork(before_fork, after_fork, after_fork) == 0;
}

static bool add(const void *values, own_values *o)
{
    pthread_mutex_lock(&lock);
    bool added = dray__idmap_set(&all, (uintptr_t)values, o);
    pthread_mutex_unlock(&lock);
    return added;
}

void *dray__own(dray__keeper_link *link, dray__mapping *mapping, const void *at, uint64_t bytes,
                const void *of)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    uint64_t offset = (uint64_t)((const uint8_t *)at - mapping->base), first = offset & ~(page - 1);
    int fd;
    pthread_once(&once, watch_forks);
    if (!forks_are_watched || dray__mapping_fd(link, mapping, &fd, NULL))
        return NULL;
    own_values *o = calloc(1, sizeof *o);
    uint64_t size = offset - first + bytes;
    void *base = MAP_FAILED;
    if (o)
        base =
            mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, fd, (off_t)first);
    dray__mapping_fd_put(mapping, fd);
    if (base != MAP_FAILED) {
        *o = (own_values){.base = base, .size = size, .of = of};
        if (add(o->base + (offset - first), o))
            return o->base + (offset - first);
        munmap(base, size);
    }
    free(o);
    return NULL;
}

void dray_own_free(void *values)
{
    pthread_mutex_lock(&lock);
    own_values *o = values ? dray__idmap_remove(&all, (uintptr_t)values) : NULL;
    pthread_mutex_unlock(&lock);
    if (o)
        munmap(o->base, o->size);
    free(o);
}
