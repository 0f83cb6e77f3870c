/* NCCL M2N (ncclReshard of libnccl_m2n, part of PyPI's nccl-extensions) on the work of bench/gpu.sh's rows
 * "apart": trainer ranks that cut dimension 0 evenly, as FSDP does, to tensor-parallel engine ranks on other
 * GPUs, one call a tensor, a layer's experts stacked as one tensor.
 *
 *   m2n [-j] [-g] [-m] [-n REPEATS] MODEL TRAINERS ENGINES
 *
 * -j: one JSON object. -g: all calls as one group. -m: matrices only, without biases, norms and routers
 * (0.04 % of the bytes). -n: timed updates (5), after two that are not. MODEL: qwen3-4b, qwen2.5-7b,
 * qwen2.5-32b, qwen3-30b-a3b. GPUs 0 to TRAINERS - 1 train, the next ENGINES infer; NCCL_RESHARD_*
 * as the library reads them. The time counts from the last trainer's start to the end of the last engine's
 * stream; the median is taken. The engines' memory is cleared before each update, and every element is
 * checked after the last one. bench/peers/build_m2n.sh builds it. */
#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <pthread.h>
#include <string>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

#include "nccl.h"
#include "nccl_m2n.h"

enum { RANKS_MAX = 16, REPEATS_MAX = 1000, WARM = 2, BLOCKS = 1056, THREADS = 256, WHOLE = -1 };

#define CUDA(call)                                                                                 \
    do {                                                                                           \
        cudaError_t e = (call);                                                                    \
        if (e != cudaSuccess)                                                                      \
            fail("%s: %s", #call, cudaGetErrorString(e));                                          \
    } while (0)
#define NCCL(call)                                                                                 \
    do {                                                                                           \
        ncclResult_t e = (call);                                                                   \
        if (e != ncclSuccess)                                                                      \
            fail("%s: %s %s", #call, ncclGetErrorString(e), ncclM2nGetLastError());                \
    } while (0)

struct tensor {
    std::vector<size_t> shape;
    int trainer_cut, engine_cut; /* dimensions; WHOLE: each rank has all of it */
    size_t at;                   /* where it begins in each rank's memory */
};

struct model {
    const char *name;
    size_t layers, hidden, heads, kv_heads, head_dim, wide, words, experts;
    bool bias, tied;
};

static const model models[] = {
    {"qwen3-4b", 36, 2560, 32, 8, 128, 9728, 151936, 0, false, true},
    {"qwen2.5-7b", 28, 3584, 28, 4, 128, 18944, 152064, 0, true, false},
    {"qwen2.5-32b", 64, 5120, 40, 8, 128, 27648, 152064, 0, true, false},
    {"qwen3-30b-a3b", 48, 2048, 32, 4, 128, 768, 151936, 128, false, false},
};

/* What all processes see. */
struct shared {
    pthread_barrier_t barrier;
    ncclUniqueId id;
    double begin[RANKS_MAX][REPEATS_MAX + WARM], end[RANKS_MAX][REPEATS_MAX + WARM];
    unsigned long long wrong[RANKS_MAX];
};

struct options {
    const model *of;
    int trainers, engines, repeats;
    bool json, grouped, matrices;
};

template <typename... Arguments> static void fail(const char *format, Arguments... arguments)
{
    std::string line = std::string("m2n: ") + format + "\n";
    fprintf(stderr, line.c_str(), arguments...);
    fflush(stderr);
    _exit(1);
}

static double now()
{
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- the work ------------------------------------------------------------------------------------ */

static std::vector<tensor> tensors_of(const options &o)
{
    const model &m = *o.of;
    std::vector<tensor> out;
    auto add = [&](std::vector<size_t> shape, int engine_cut, int trainer_cut = 0) {
        if (!o.matrices || (shape.size() > 1 && engine_cut != WHOLE))
            out.push_back({shape, trainer_cut, engine_cut, 0});
    };
    size_t h = m.hidden, q = m.heads * m.head_dim, kv = m.kv_heads * m.head_dim;
    add({m.words, h}, 0);
    for (size_t l = 0; l < m.layers; l++) {
        for (size_t rows : {q, kv, kv}) {
            add({rows, h}, 0);
            if (m.bias)
                add({rows}, 0);
        }
        if (!m.bias) {
            add({m.head_dim}, WHOLE);
            add({m.head_dim}, WHOLE);
        }
        add({h, q}, 1);
        if (m.experts) { /* each expert's tensors are cut, as FSDP cuts them one by one */
            add({m.experts, m.wide, h}, 1, 1);
            add({m.experts, m.wide, h}, 1, 1);
            add({m.experts, h, m.wide}, 2, 1);
            add({m.experts, h}, WHOLE);
        } else {
            add({m.wide, h}, 0);
            add({m.wide, h}, 0);
            add({h, m.wide}, 1);
        }
        add({h}, WHOLE);
        add({h}, WHOLE);
    }
    add({h}, WHOLE);
    if (!m.tied)
        add({m.words, h}, 0);
    return out;
}

static size_t count_of(const tensor &t)
{
    size_t n = 1;
    for (size_t d : t.shape)
        n *= d;
    return n;
}

/* A rank's part of a tensor: `length` of the cut dimension's `full`, from `first`. */
struct part {
    size_t outer, full, first, length, inner;
};

static part part_of(const tensor &t, int cut, int rank, int world)
{
    if (cut == WHOLE)
        return {1, count_of(t), 0, count_of(t), 1};
    part p = {1, t.shape[cut], 0, t.shape[cut] / world, 1};
    if (t.shape[cut] % world)
        fail("a dimension of %zu cannot be cut evenly for %d ranks", t.shape[cut], world);
    p.first = rank * p.length;
    for (int d = 0; d < (int)t.shape.size(); d++)
        (d < cut ? p.outer : p.inner) *= d == cut ? 1 : t.shape[d];
    return p;
}

/* Writes the values of a part, or counts those that are not what they must be. */
__global__ void values(unsigned short *data, part p, unsigned seed, unsigned long long *wrong)
{
    size_t count = p.outer * p.length * p.inner, step = (size_t)gridDim.x * blockDim.x;
    unsigned long long bad = 0;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < count; i += step) {
        size_t row = i / p.inner, outer = row / p.length;
        size_t at = (outer * p.full + p.first + row % p.length) * p.inner + i % p.inner;
        unsigned short value = (unsigned short)(((unsigned)at * 2654435761u + seed) >> 13);
        if (!wrong)
            data[i] = value;
        else
            bad += data[i] != value;
    }
    if (bad)
        atomicAdd(wrong, bad);
}

/* ---- a rank -------------------------------------------------------------------------------------- */

struct rank {
    const options *o;
    shared *s;
    int number;
    bool trains;
    std::vector<tensor> tensors;
    char *memory = NULL;
    size_t bytes = 0;
    ncclComm_t comm = NULL;
    ncclM2nHandle_t m2n = NULL;
    cudaStream_t stream = NULL;
    ncclMesh_t from = NCCL_M2N_MESH_INITIALIZER, to = from;
    int dims[2] = {0, 0};
};

/* All ranks lay tensors out alike, each where the larger of both sides' parts fits. */
static void lay_out(rank &r)
{
    int least = std::min(r.o->trainers, r.o->engines);
    for (tensor &t : r.tensors) {
        t.at = r.bytes;
        size_t parts = t.engine_cut == WHOLE ? 1 : least;
        r.bytes += (2 * count_of(t) / parts + 511) & ~(size_t)511;
    }
}

static void for_values(rank &r, unsigned long long *wrong)
{
    int world = r.trains ? r.o->trainers : r.o->engines;
    int own = r.trains ? r.number : r.number - r.o->trainers;
    for (size_t i = 0; i < r.tensors.size(); i++) {
        const tensor &t = r.tensors[i];
        part p = part_of(t, r.trains ? t.trainer_cut : t.engine_cut, own, world);
        values<<<BLOCKS, THREADS>>>((unsigned short *)(r.memory + t.at), p,
                                    (unsigned)(i + 1) * 40503u, wrong);
    }
    CUDA(cudaGetLastError());
    CUDA(cudaDeviceSynchronize());
}

static void reshard(rank &r, tensor &t)
{
    size_t from_shape[3], to_shape[3];
    int from_cut = t.trainer_cut, to_cut = t.engine_cut == WHOLE ? NCCL_RESHARD_REPLICATE
                                                                 : t.engine_cut;
    ncclDistTensor_t from = NCCL_M2N_DIST_TENSOR_INITIALIZER, to = from;
    for (int d = 0; d < (int)t.shape.size(); d++) {
        from_shape[d] = t.shape[d] / (d == from_cut ? r.o->trainers : 1);
        to_shape[d] = t.shape[d] / (d == to_cut ? r.o->engines : 1);
    }
    from.dataPtr = r.trains ? r.memory + t.at : NULL;
    to.dataPtr = r.trains ? NULL : r.memory + t.at;
    from.ndims = to.ndims = (int)t.shape.size();
    from.dtype = to.dtype = ncclBfloat16;
    from.localShape = from_shape;
    to.localShape = to_shape;
    from.placements = &from_cut;
    to.placements = &to_cut;
    from.mesh = &r.from;
    to.mesh = &r.to;
    NCCL(ncclReshard(r.m2n, r.comm, &from, &to, r.stream));
}

static void update(rank &r, int step)
{
    if (!r.trains)
        CUDA(cudaMemset(r.memory, 0, r.bytes));
    CUDA(cudaDeviceSynchronize());
    pthread_barrier_wait(&r.s->barrier);
    r.s->begin[r.number][step] = now();
    if (r.o->grouped)
        NCCL(ncclM2nGroupStart());
    for (tensor &t : r.tensors)
        reshard(r, t);
    if (r.o->grouped)
        NCCL(ncclM2nGroupEnd());
    CUDA(cudaStreamSynchronize(r.stream));
    r.s->end[r.number][step] = now();
    pthread_barrier_wait(&r.s->barrier);
}

static void run_rank(const options &o, shared *s, int number)
{
    rank r = {&o, s, number, number < o.trainers, tensors_of(o)};
    lay_out(r);
    CUDA(cudaSetDevice(number));
    if (!number)
        NCCL(ncclGetUniqueId(&s->id));
    pthread_barrier_wait(&s->barrier);
    CUDA(cudaMalloc(&r.memory, r.bytes));
    NCCL(ncclCommInitRank(&r.comm, o.trainers + o.engines, s->id, number));
    CUDA(cudaStreamCreateWithFlags(&r.stream, cudaStreamNonBlocking));
    NCCL(ncclM2nInit(&r.m2n, NULL));
    r.dims[0] = o.trainers;
    r.dims[1] = o.engines;
    r.from.ndims = r.to.ndims = 1;
    r.from.dims = &r.dims[0];
    r.to.dims = &r.dims[1];
    r.to.startRank = o.trainers;
    if (r.trains)
        for_values(r, NULL);
    for (int step = 0; step < o.repeats + WARM; step++)
        update(r, step);
    if (!r.trains) {
        unsigned long long *wrong;
        CUDA(cudaMallocHost(&wrong, sizeof *wrong));
        *wrong = 0;
        for_values(r, wrong);
        s->wrong[number] = *wrong;
    }
    pthread_barrier_wait(&s->barrier);
    _exit(0);
}

/* ---- the parent ---------------------------------------------------------------------------------- */

static int report(const options &o, const shared *s)
{
    std::vector<double> seconds;
    size_t bytes = 0, count = 0;
    for (const tensor &t : tensors_of(o))
        bytes += 2 * count_of(t), count++;
    for (int r = 0; r < o.trainers + o.engines; r++)
        if (s->wrong[r])
            fail("%llu elements of rank %d are wrong", s->wrong[r], r);
    for (int step = WARM; step < o.repeats + WARM; step++) {
        double begin = 0, end = 0;
        for (int r = 0; r < o.trainers + o.engines; r++)
            if (r < o.trainers)
                begin = std::max(begin, s->begin[r][step]);
            else
                end = std::max(end, s->end[r][step]);
        seconds.push_back(end - begin);
    }
    std::sort(seconds.begin(), seconds.end());
    size_t n = seconds.size();
    double median = (seconds[(n - 1) / 2] + seconds[n / 2]) / 2;
    int version = 0;
    ncclGetVersion(&version);
    if (o.json)
        printf("{\"flow\": \"m2n\", \"model\": \"%s\", \"gpus\": %d, \"bytes\": %zu, \"tensors\": %zu, "
               "\"median_seconds\": %.9f, \"repeats\": %zu, \"checked\": true, \"nccl\": %d, "
               "\"m2n\": %d, \"grouped\": %s, \"matrices_only\": %s}\n",
               o.of->name, o.trainers + o.engines, bytes, count, median, n, version,
               NCCL_M2N_VERSION_CODE, o.grouped ? "true" : "false", o.matrices ? "true" : "false");
    else
        printf("m2n, %s, %.1f GB, %d -> %d GPUs: median %.1f ms of %zu, %.1f to %.1f; every element "
               "checked\n",
               o.of->name, (double)bytes * 1e-9, o.trainers, o.engines, median * 1e3, n,
               seconds[0] * 1e3, seconds[n - 1] * 1e3);
    return 0;
}

static int usage()
{
    fprintf(stderr, "Usage: m2n [-j] [-g] [-m] [-n REPEATS] MODEL TRAINERS ENGINES\nModels:");
    for (const model &m : models)
        fprintf(stderr, " %s", m.name);
    fprintf(stderr, "\n");
    return 2;
}

int main(int argc, char **argv)
{
    options o = {NULL, 0, 0, 5, false, false, false};
    for (int key; (key = getopt(argc, argv, "jgmn:")) != -1;)
        if (key == 'j')
            o.json = true;
        else if (key == 'g')
            o.grouped = true;
        else if (key == 'm')
            o.matrices = true;
        else if (key != 'n' || (o.repeats = atoi(optarg)) < 1 || o.repeats > REPEATS_MAX)
            return usage();
    if (argc - optind != 3)
        return usage();
    for (const model &m : models)
        o.of = strcmp(m.name, argv[optind]) ? o.of : &m;
    o.trainers = atoi(argv[optind + 1]);
    o.engines = atoi(argv[optind + 2]);
    if (!o.of || o.trainers < 1 || o.engines < 1 || o.trainers + o.engines > RANKS_MAX ||
        (size_t)o.engines > o.of->kv_heads)
        return usage();
    shared *s = (shared *)mmap(NULL, sizeof *s, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
                               -1, 0);
    pthread_barrierattr_t attributes;
    if (s == MAP_FAILED)
        fail("no shared memory");
    pthread_barrierattr_init(&attributes);
    pthread_barrierattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_barrier_init(&s->barrier, &attributes, (unsigned)(o.trainers + o.engines));
    std::vector<pid_t> pids;
    for (int r = 0; r < o.trainers + o.engines; r++) {
        pids.push_back(fork());
        if (pids.back() < 0)
            fail("fork failed");
        if (pids.back() == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            run_rank(o, s, r);
        }
    }
    for (size_t ended = 0; ended < pids.size(); ended++) {
        int status = 0;
        wait(&status);
        if (!status)
            continue;
        for (pid_t pid : pids) /* the others wait for the one that failed */
            kill(pid, SIGKILL);
        fail("a rank ended with status %d", status);
    }
    return report(o, s);
}
