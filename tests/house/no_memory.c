/* The allocators of libc, one call of which fails (no_memory.h). The caller is known by its return
 * address: libdray's code lies between two symbols of a test program (library_text.ld), libjansson
 * and libevent are found among the loaded libraries. The parser of jansson 2.14 is left out: where
 * its buffer cannot grow it loses a byte of a text, or ends the process by an assertion.
 *
 * Preloaded, with DRAY_NO_MEMORY=FILE: the file holds the state below, which all processes of the
 * test share. Whoever begins the test writes `at`, and reads the rest after its end. */
#include "no_memory.h"

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include <unwind.h>

typedef struct state {
    uint64_t at, count, failed;
} state;

enum { RANGES = 4 };

static state own, *s = &own;
static struct {
    uintptr_t begin, end;
} ranges[RANGES];
static size_t range_count;
static uintptr_t base; /* where the program was loaded */
static __thread bool spared;

extern char dray_text_begin[] __attribute__((weak));
extern char dray_text_end[] __attribute__((weak));

/* ---- whose call it is ------------------------------------------------------------------------ */

static int add_library(struct dl_phdr_info *info, size_t size, void *user)
{
    (void)size, (void)user;
    if (!info->dlpi_name[0])
        base = info->dlpi_addr;
    if (!strstr(info->dlpi_name, "/libjansson.so") && !strstr(info->dlpi_name, "/libevent_core"))
        return 0;
    for (int i = 0; i < info->dlpi_phnum && range_count < RANGES; i++) {
        const ElfW(Phdr) *p = &info->dlpi_phdr[i];
        if (p->p_type == PT_LOAD && p->p_flags & PF_X) {
            ranges[range_count].begin = info->dlpi_addr + p->p_vaddr;
            ranges[range_count++].end = info->dlpi_addr + p->p_vaddr + p->p_memsz;
        }
    }
    return 0;
}

__attribute__((constructor)) static void begin(void)
{
    const char *path = getenv("DRAY_NO_MEMORY");
    ranges[0].begin = (uintptr_t)dray_text_begin;
    ranges[0].end = (uintptr_t)dray_text_end;
    range_count = 1;
    dl_iterate_phdr(add_library, NULL);
    int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0)
        return;
    void *(*map)(void *, size_t, int, int, int, off_t);
    *(void **)&map = dlsym(RTLD_NEXT, "mmap");
    void *shared = map(NULL, sizeof own, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (shared != MAP_FAILED)
        s = shared;
}

static bool is_in(size_t range, uintptr_t address)
{
    return address >= ranges[range].begin && address < ranges[range].end;
}

typedef struct place {
    uintptr_t address; /* in libdray; 0: not found, the test calls the other library itself */
    bool parser;
} place;

static _Unwind_Reason_Code look(struct _Unwind_Context *context, void *user)
{
    place *found = user;
    Dl_info info = {0};
    uintptr_t at = _Unwind_GetIP(context);
    if (is_in(0, at)) {
        found->address = at;
        return _URC_END_OF_STACK;
    }
    bool named = dladdr((void *)at, &info) && info.dli_sname;
    found->parser = found->parser || (named && strncmp(info.dli_sname, "json_load", 9) == 0);
    return _URC_NO_REASON;
}

static bool fails(const void *caller)
{
    uintptr_t from = (uintptr_t)caller;
    bool counts = false;
    for (size_t i = 0; i < range_count; i++)
        counts = counts || is_in(i, from);
    if (!counts || spared)
        return false;
    uint64_t number = __atomic_add_fetch(&s->count, 1, __ATOMIC_RELAXED);
    if (number != __atomic_load_n(&s->at, __ATOMIC_RELAXED))
        return false;
    place found = {0};
    _Unwind_Backtrace(look, &found);
    __atomic_store_n(&s->failed, (found.address ? found.address : from) - base, __ATOMIC_RELAXED);
    errno = ENOMEM;
    return found.address && !found.parser;
}

void no_memory_at(uint64_t number)
{
    __atomic_store_n(&s->at, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&s->failed, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&s->count, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&s->at, number, __ATOMIC_RELAXED);
}

uint64_t no_memory_count(void)
{
    return __atomic_load_n(&s->count, __ATOMIC_RELAXED);
}

uint64_t no_memory_failed(void)
{
    return __atomic_load_n(&s->failed, __ATOMIC_RELAXED);
}

void no_memory_spare_thread(void)
{
    spared = true;
}

/* ---- the allocators -------------------------------------------------------------------------- */

/* `real` is resolved by several threads at once to the same value. */
#define REAL(name)                                                                                 \
    static __typeof__(&name) real;                                                                 \
    if (!real)                                                                                     \
    *(void **)&real = dlsym(RTLD_NEXT, #name)

#define ALLOCATOR(type, name, failed, parameters, arguments)                                       \
    type name parameters                                                                           \
    {                                                                                              \
        REAL(name);                                                                                \
        return fails(__builtin_return_address(0)) ? (failed) : real arguments;                     \
    }

ALLOCATOR(void *, malloc, NULL, (size_t size), (size))
ALLOCATOR(void *, calloc, NULL, (size_t count, size_t size), (count, size))
ALLOCATOR(void *, realloc, NULL, (void *old, size_t size), (old, size))
ALLOCATOR(void *, reallocarray, NULL, (void *old, size_t count, size_t size), (old, count, size))
ALLOCATOR(void *, aligned_alloc, NULL, (size_t alignment, size_t size), (alignment, size))
ALLOCATOR(int, posix_memalign, ENOMEM, (void **out, size_t alignment, size_t size),
          (out, alignment, size))
ALLOCATOR(char *, strdup, NULL, (const char *text), (text))
ALLOCATOR(char *, strndup, NULL, (const char *text, size_t size), (text, size))
ALLOCATOR(int, vasprintf, -1, (char **out, const char *format, va_list list), (out, format, list))
ALLOCATOR(char *, realpath, NULL, (const char *path, char *out), (path, out))
ALLOCATOR(FILE *, fopen, NULL, (const char *path, const char *mode), (path, mode))
ALLOCATOR(FILE *, fdopen, NULL, (int fd, const char *mode), (fd, mode))
ALLOCATOR(FILE *, open_memstream, NULL, (char **out, size_t *size), (out, size))
ALLOCATOR(DIR *, opendir, NULL, (const char *path), (path))
ALLOCATOR(DIR *, fdopendir, NULL, (int fd), (fd))
ALLOCATOR(int, memfd_create, -1, (const char *name, unsigned flags), (name, flags))
ALLOCATOR(void *, mmap, MAP_FAILED,
          (void *at, size_t size, int protection, int flags, int fd, off_t offset),
          (at, size, protection, flags, fd, offset))

int asprintf(char **out, const char *format, ...)
{
    va_list list;
    va_start(list, format);
    int n = fails(__builtin_return_address(0)) ? -1 : vasprintf(out, format, list);
    va_end(list);
    return n;
}

/* The names of builds with _FORTIFY_SOURCE. */
int __vasprintf_chk(char **out, int level, const char *format, va_list list);
int __asprintf_chk(char **out, int level, const char *format, ...);

int __vasprintf_chk(char **out, int level, const char *format, va_list list)
{
    (void)level;
    return fails(__builtin_return_address(0)) ? -1 : vasprintf(out, format, list);
}

int __asprintf_chk(char **out, int level, const char *format, ...)
{
    (void)level;
    va_list list;
    va_start(list, format);
    int n = fails(__builtin_return_address(0)) ? -1 : vasprintf(out, format, list);
    va_end(list);
    return n;
}
