/* Makes streams wait for readers (gate.h). */
#include "weights/publish/gate.h"

#include "base/error.h"

#include <pthread.h>

enum { PAGE = 4096 };

/* The page of a word, and a link of the list of words that no gate has. A stream may come to its
 * wait after the gate is gone, so words are never freed. A later gate takes one over: its value
 * only grows, so that earlier waits stay over. */
struct page {
    uint32_t word;
    dray_region *region;
    struct page *next;
};

static pthread_mutex_t spare_lock = PTHREAD_MUTEX_INITIALIZER;
static struct page *spare;

static struct page *page_of(const dray_region *region)
{
    return (struct page *)(uintptr_t)dray_region_base(region);
}

static void open_gate(const dray__gate *g)
{
    __atomic_store_n(&page_of(g->word)->word, g->value, __ATOMIC_SEQ_CST);
}

/* Returns false when there is no spare word of this GPU. */
static bool take_spare(dray__gate *g, const dray__cuda_device *device)
{
    pthread_mutex_lock(&spare_lock);
    struct page **at = &spare;
    while (*at && (*at)->region->device != device)
        at = &(*at)->next;
    struct page *found = *at;
    if (found) {
        *at = found->next;
        g->word = found->region;
        g->value = found->word;
    }
    pthread_mutex_unlock(&spare_lock);
    return found != NULL;
}

static void give_spare(dray_region *word)
{
    struct page *page = page_of(word);
    pthread_mutex_lock(&spare_lock);
    page->region = word;
    page->next = spare;
    spare = page;
    pthread_mutex_unlock(&spare_lock);
}

static void *run(void *user)
{
    dray__gate *g = user;
    g->wait(g->user, g->version, g->timeout_ns, &g->outcome);
    open_gate(g);
    return NULL;
}

static int make_word(dray__gate *g, dray__cuda_device *device, dray_error *error)
{
    if (g->word || take_spare(g, device))
        return DRAY_OK;
    int rc = dray__cuda_enter(device, error);
    if (rc)
        return rc;
    rc = dray_region_alloc(DRAY_REGION_PINNED, PAGE, "gate", &g->word, error);
    dray__cuda_leave();
    return rc;
}

int dray__gate_close(dray__gate *g, dray__cuda_device *device, CUstream stream, dray_error *error)
{
    const dray__cuda *cuda = dray__cuda_get(error);
    int rc = cuda ? make_word(g, device, error) : DRAY_EUNSUPPORTED;
    if (rc)
        return rc;
    if (!cuda->cuStreamWaitValue32)
        return dray__fail(error, DRAY_EUNSUPPORTED,
                          "the driver lets no stream wait for a word: wait for the readers");
    g->value++;
    g->outcome = (dray_error){0};
    rc = dray__cuda_enter(device, error);
    if (rc)
        return rc;
    CUresult result = cuda->cuStreamWaitValue32(stream, g->word->device_address, g->value,
                                                CU_STREAM_WAIT_VALUE_GEQ);
    dray__cuda_leave();
    if (result)
        return dray__fail_cuda(error, result, "a wait on a stream of %s", device->name);
    rc = dray__thread_start(&g->thread, run, g, "a wait for readers", error);
    if (rc)
        open_gate(g);
    return rc;
}

int dray__gate_join(dray__gate *g, dray_error *error)
{
    if (!g->thread.begun)
        return DRAY_OK;
    dray__thread_join(&g->thread);
    if (g->outcome.code && error)
        *error = g->outcome;
    return g->outcome.code;
}

void dray__gate_free(dray__gate *g)
{
    dray__gate_join(g, NULL);
    if (g->word)
        give_spare(g->word);
    g->word = NULL;
}
