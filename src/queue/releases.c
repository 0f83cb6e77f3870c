#include "queue/releases.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { SEALS = F_SEAL_SHRINK | F_SEAL_GROW }; /* else the other side could be made to fault */

static dray__releases *map(int fd)
{
    void *at = mmap(NULL, sizeof(dray__releases), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return at == MAP_FAILED ? NULL : at;
}

dray__releases *dray__releases_new(int *fd)
{
    dray__releases *page = NULL;
    int memory = memfd_create("dray-releases", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (memory < 0)
        return NULL;
    if (ftruncate(memory, sizeof *page) == 0 && fcntl(memory, F_ADD_SEALS, SEALS) == 0)
        page = map(memory);
    if (page)
        *fd = memory;
    else
        close(memory);
    return page;
}

dray__releases *dray__releases_map(int fd)
{
    struct stat st;
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || (seals & SEALS) != SEALS || fstat(fd, &st) < 0 ||
        st.st_size != (off_t)sizeof(dray__releases))
        return NULL;
    return map(fd);
}

void dray__releases_free(dray__releases *page)
{
    if (page)
        munmap(page, sizeof *page);
}

/* The client writes and then looks whether it is wanted; the controller says that it is and then
 * reads. In the one order of these four (hence SEQ_CST) one of the two sees the other's. */

bool dray__releases_write(dray__releases *page, uint32_t ticket, uint32_t frees)
{
    if (!page || __atomic_load_n(&page->wanted, __ATOMIC_RELAXED) & frees)
        return false;
    uint32_t written = page->written;
    if (written - __atomic_load_n(&page->read, __ATOMIC_ACQUIRE) >= DRAY__RELEASES)
        return false;
    __atomic_store_n(&page->tickets[written % DRAY__RELEASES], ticket, __ATOMIC_RELAXED);
    __atomic_store_n(&page->written, written + 1, __ATOMIC_SEQ_CST);
    return !(__atomic_load_n(&page->wanted, __ATOMIC_SEQ_CST) & frees);
}

uint32_t dray__releases_read(dray__releases *page, uint32_t *read, uint32_t out[DRAY__RELEASES])
{
    uint32_t written = __atomic_load_n(&page->written, __ATOMIC_SEQ_CST), count = written - *read;
    if (!count)
        return 0;
    if (count > DRAY__RELEASES) /* a client that lies */
        count = DRAY__RELEASES;
    for (uint32_t i = 0; i < count; i++)
        out[i] = __atomic_load_n(&page->tickets[(written - count + i) % DRAY__RELEASES],
                                 __ATOMIC_RELAXED);
    *read = written;
    __atomic_store_n(&page->read, written, __ATOMIC_RELEASE);
    return count;
}

void dray__releases_want(dray__releases *page, uint32_t wanted)
{
    __atomic_store_n(&page->wanted, wanted, __ATOMIC_SEQ_CST);
}
