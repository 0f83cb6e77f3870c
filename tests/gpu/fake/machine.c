/* What the processes of one fake machine share: a file with an entry for each allocation that a
 * process holds. Entries of processes that died count no more. */
#include "fake.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

enum { ENTRIES = 1 << 16 };

typedef struct entry {
    uint64_t id, bytes, start;
    int32_t pid;
    int16_t physical;
    int16_t imported; /* someone else allocated it */
} entry;

typedef struct machine {
    uint64_t next_id;
    uint64_t used; /* entries that were ever in use */
    entry entries[ENTRIES];
} machine;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static machine *shared;
static int state_fd = -1;
static uint64_t own_start;

static machine *map_state(void)
{
    const char *path = getenv("FAKE_CUDA_STATE");
    char own[64];
    if (!path || !*path) {
        snprintf(own, sizeof own, "/dev/shm/fake-cuda-%u", (unsigned)getuid());
        path = own;
    }
    state_fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (state_fd < 0 || ftruncate(state_fd, sizeof(machine))) {
        fprintf(stderr, "fake CUDA: %s: %s\n", path, strerror(errno));
        abort();
    }
    void *at = mmap(NULL, sizeof(machine), PROT_READ | PROT_WRITE, MAP_SHARED, state_fd, 0);
    if (at == MAP_FAILED)
        abort();
    own_start = fake_start_of(getpid());
    return at;
}

static machine *enter(void)
{
    pthread_mutex_lock(&lock);
    if (!shared)
        shared = map_state();
    while (flock(state_fd, LOCK_EX) && errno == EINTR)
        ;
    return shared;
}

static void leave(void)
{
    flock(state_fd, LOCK_UN);
    pthread_mutex_unlock(&lock);
}

uint64_t fake_start_of(pid_t pid)
{
    char path[48], text[512];
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 0;
    ssize_t n = read(fd, text, sizeof text - 1);
    close(fd);
    if (n <= 0)
        return 0;
    text[n] = 0;
    const char *at = strrchr(text, ')');
    if (!at || at[2] == 'Z' || at[2] == 'X')
        return 0;
    for (int field = 0; field < 20 && at; field++)
        at = strchr(at + 1, ' ');
    return at ? strtoull(at + 1, NULL, 10) : 0;
}

bool fake_alive(pid_t pid, uint64_t start)
{
    return start && fake_start_of(pid) == start;
}

uint64_t fake_id(void)
{
    machine *m = enter();
    uint64_t id = ++m->next_id;
    leave();
    return id;
}

/* Forgets what dead processes held. */
static void prune(machine *m)
{
    entry last = {0};
    bool alive = false;
    for (uint64_t i = 0; i < m->used; i++) {
        entry *e = &m->entries[i];
        if (!e->id)
            continue;
        if (e->pid != last.pid || e->start != last.start) {
            last = *e;
            alive = fake_alive(e->pid, e->start);
        }
        if (!alive)
            e->id = 0;
    }
    while (m->used && !m->entries[m->used - 1].id)
        m->used--;
}

static uint64_t used_of(machine *m, int physical)
{
    uint64_t bytes = 0;
    prune(m);
    for (uint64_t i = 0; i < m->used; i++) {
        const entry *e = &m->entries[i];
        bool counted = !e->id || e->physical != physical;
        for (uint64_t j = 0; j < m->used && e->imported && !counted; j++)
            counted = m->entries[j].id == e->id && (j < i || !m->entries[j].imported);
        if (!counted)
            bytes += e->bytes;
    }
    return bytes;
}

uint64_t fake_total(void)
{
    return fake_number("FAKE_CUDA_BYTES", UINT64_C(8) << 30);
}

uint64_t fake_used(int physical)
{
    machine *m = enter();
    uint64_t bytes = used_of(m, physical);
    leave();
    return bytes;
}

bool fake_hold(uint64_t id, int physical, uint64_t bytes, bool fresh)
{
    machine *m = enter();
    bool fits = !fresh || bytes <= fake_total() - used_of(m, physical);
    uint64_t i = 0;
    while (i < m->used && m->entries[i].id)
        i++;
    fits = fits && i < ENTRIES;
    if (fits) {
        m->entries[i] = (entry){id, bytes, own_start, getpid(), (int16_t)physical, !fresh};
        m->used = i < m->used ? m->used : i + 1;
    }
    leave();
    return fits;
}

void fake_drop(uint64_t id)
{
    machine *m = enter();
    for (uint64_t i = 0; i < m->used; i++)
        if (m->entries[i].id == id && m->entries[i].pid == getpid()) {
            m->entries[i].id = 0;
            break;
        }
    leave();
}

bool fake_held(uint64_t id, pid_t pid, uint64_t start)
{
    machine *m = enter();
    bool found = false;
    for (uint64_t i = 0; i < m->used && !found; i++) {
        const entry *e = &m->entries[i];
        found = e->id == id && e->pid == pid && e->start == start;
    }
    leave();
    return found && fake_alive(pid, start);
}
