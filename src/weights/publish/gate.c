/* Makes streams wait for readers (gate.h). */
#include "weights/publish/gate.h"

#include "base/error.h"

enum { PAGE = 4096 };

static void open_gate(const dray__gate *g)
{
    __atomic_store_n((uint32_t *)(uintptr_t)dray_region_base(g->word), g->value, __ATOMIC_SEQ_CST);
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
    if (g->word)
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
    dray_region_free(g->word);
    g->word = NULL;
}
