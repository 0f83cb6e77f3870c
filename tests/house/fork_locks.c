/* Preloaded into the C tests under the address sanitizer. A process that forks while one of its
 * threads allocates leaves the sanitizer's allocator locked in the child, which then waits for ever
 * at an allocation: unlike glibc, gcc 12's runtime does not take its locks at a fork. Here each
 * allocation holds a lock for reading, and a fork takes that lock for writing. */
#include <dlfcn.h>
#include <malloc.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

static const pthread_rwlock_t forks_free = PTHREAD_RWLOCK_WRITER_NONRECURSIVE_INITIALIZER_NP;
static pthread_rwlock_t forks = PTHREAD_RWLOCK_WRITER_NONRECURSIVE_INITIALIZER_NP;

static void before_fork(void)
{
    pthread_rwlock_wrlock(&forks);
}

static void after_fork(void)
{
    pthread_rwlock_unlock(&forks);
}

static void in_child(void)
{
    forks = forks_free; /* readers of the other threads may have waited for it */
}

/* Handlers that run before a fork run in reverse order: this one is last. Those before it may
 * allocate, and may wait for threads that do. */
__attribute__((constructor(101))) static void begin(void)
{
    pthread_atfork(before_fork, after_fork, in_child);
}

/* Several threads at once resolve `real` to the same value. */
#define REAL(name)                                                                                 \
    static __typeof__(&name) real;                                                                 \
    if (!real)                                                                                     \
    *(void **)&real = dlsym(RTLD_NEXT, #name)

#define ALLOCATOR(type, name, parameters, arguments)                                               \
    type name parameters                                                                           \
    {                                                                                              \
        REAL(name);                                                                                \
        pthread_rwlock_rdlock(&forks);                                                             \
        type result = real arguments;                                                              \
        pthread_rwlock_unlock(&forks);                                                             \
        return result;                                                                             \
    }

ALLOCATOR(void *, malloc, (size_t size), (size))
ALLOCATOR(void *, calloc, (size_t count, size_t size), (count, size))
ALLOCATOR(void *, realloc, (void *old, size_t size), (old, size))
ALLOCATOR(void *, reallocarray, (void *old, size_t count, size_t size), (old, count, size))
ALLOCATOR(void *, memalign, (size_t alignment, size_t size), (alignment, size))
ALLOCATOR(void *, aligned_alloc, (size_t alignment, size_t size), (alignment, size))
ALLOCATOR(int, posix_memalign, (void **out, size_t alignment, size_t size), (out, alignment, size))
ALLOCATOR(char *, strdup, (const char *text), (text))
ALLOCATOR(char *, strndup, (const char *text, size_t size), (text, size))

/* dlsym frees the message of an earlier failure: that one stays. */
void free(void *memory)
{
    static __thread bool is_looked_up __attribute__((tls_model("initial-exec")));
    if (is_looked_up)
        return;
    is_looked_up = true;
    REAL(free);
    is_looked_up = false;
    pthread_rwlock_rdlock(&forks);
    real(memory);
    pthread_rwlock_unlock(&forks);
}

/* The leak checker knows the dynamic linker's own memory by the allocator's caller, which is this
 * library now. */
const char *__lsan_default_suppressions(void);

const char *__lsan_default_suppressions(void)
{
    return "leak:/ld-linux\n";
}
