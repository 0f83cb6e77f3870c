/* A fake NVRTC: looks at what it is given as the compiler would (an architecture, all headers that
 * are included, all kernels), and makes a cubin that the fake driver loads.
 *
 *   FAKE_NVRTC_FAIL=1    no program compiles */
#include "module.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OUT_OF_MEMORY = 1, INVALID_INPUT = 3, INVALID_PROGRAM = 4, INVALID_OPTION = 5, FAILED = 6 };

typedef struct nvrtc_program {
    char *source; /* and its headers, one after the other */
    char **names; /* of headers */
    int name_count;
    char log[512];
    fake_image image;
    bool compiled;
} nvrtc_program;

int nvrtcVersion(int *major, int *minor);
const char *nvrtcGetErrorString(int result);
int nvrtcGetNumSupportedArchs(int *count);
int nvrtcGetSupportedArchs(int *archs);
int nvrtcCreateProgram(nvrtc_program **out, const char *source, const char *name, int count,
                       const char *const *headers, const char *const *names);
int nvrtcDestroyProgram(nvrtc_program **program);
int nvrtcCompileProgram(nvrtc_program *p, int count, const char *const *options);
int nvrtcGetCUBINSize(nvrtc_program *p, size_t *size);
int nvrtcGetCUBIN(nvrtc_program *p, char *out);
int nvrtcGetPTXSize(nvrtc_program *p, size_t *size);
int nvrtcGetPTX(nvrtc_program *p, char *out);
int nvrtcGetProgramLogSize(nvrtc_program *p, size_t *size);
int nvrtcGetProgramLog(nvrtc_program *p, char *out);

int nvrtcVersion(int *major, int *minor)
{
    *major = 13;
    *minor = 0;
    return 0;
}

const char *nvrtcGetErrorString(int result)
{
    return result == FAILED ? "NVRTC_ERROR_COMPILATION" : result ? "NVRTC_ERROR" : "NVRTC_SUCCESS";
}

static const int archs[] = {75, 80, 90, 100, 120};

int nvrtcGetNumSupportedArchs(int *count)
{
    *count = sizeof archs / sizeof *archs;
    return 0;
}

int nvrtcGetSupportedArchs(int *out)
{
    memcpy(out, archs, sizeof archs);
    return 0;
}

int nvrtcDestroyProgram(nvrtc_program **program)
{
    nvrtc_program *p = *program;
    if (!p)
        return INVALID_PROGRAM;
    for (int i = 0; p->names && i < p->name_count; i++)
        free(p->names[i]);
    free(p->names);
    free(p->source);
    free(p);
    *program = NULL;
    return 0;
}

int nvrtcCreateProgram(nvrtc_program **out, const char *source, const char *name, int count,
                       const char *const *headers, const char *const *names)
{
    (void)name;
    if (!source || count < 0 || (count && (!headers || !names)))
        return INVALID_INPUT;
    nvrtc_program *p = calloc(1, sizeof *p);
    if (!p)
        return OUT_OF_MEMORY;
    size_t size = strlen(source) + 1;
    for (int i = 0; i < count; i++)
        size += strlen(headers[i]);
    p->source = calloc(size, 1);
    p->names = calloc((size_t)count + 1, sizeof *p->names);
    bool whole = p->source && p->names;
    if (whole)
        strcat(p->source, source);
    for (int i = 0; i < count && whole; i++) {
        strcat(p->source, headers[i]);
        p->names[i] = strdup(names[i]);
        p->name_count = i + 1;
        whole = p->names[i] != NULL;
    }
    if (!whole) {
        nvrtcDestroyProgram(&p);
        return OUT_OF_MEMORY;
    }
    *out = p;
    return 0;
}

static bool has_header(const nvrtc_program *p, const char *name, size_t length)
{
    for (int i = 0; i < p->name_count; i++)
        if (strlen(p->names[i]) == length && strncmp(p->names[i], name, length) == 0)
            return true;
    return false;
}

static int check_source(nvrtc_program *p)
{
    for (const char *at = p->source; (at = strstr(at, "\n#include \"")); at++) {
        const char *name = at + strlen("\n#include \"");
        size_t length = strcspn(name, "\"");
        if (has_header(p, name, length))
            continue;
        snprintf(p->log, sizeof p->log, "error: could not open source file \"%.*s\"\n", (int)length,
                 name);
        return FAILED;
    }
    for (size_t i = 0; i < fake_kernel_count; i++)
        if (!strstr(p->source, fake_kernels[i].name)) {
            snprintf(p->log, sizeof p->log, "error: no kernel %s\n", fake_kernels[i].name);
            return FAILED;
        }
    return 0;
}

int nvrtcCompileProgram(nvrtc_program *p, int count, const char *const *options)
{
    if (!p)
        return INVALID_PROGRAM;
    unsigned arch = 0;
    for (int i = 0; i < count; i++) {
        const char *equals = strchr(options[i], '=');
        bool names_arch = strncmp(options[i], "--gpu-architecture=", 19) == 0 ||
                          strncmp(options[i], "-arch=", 6) == 0;
        if (names_arch && sscanf(equals + 1, "sm_%u", &arch) != 1)
            return INVALID_OPTION;
    }
    if (!arch || fake_number("FAKE_NVRTC_FAIL", 0)) {
        snprintf(p->log, sizeof p->log, "error: %s\n",
                 arch ? "a failure was asked for" : "no architecture was given");
        return FAILED;
    }
    int rc = check_source(p);
    if (rc)
        return rc;
    p->image = (fake_image){
        .magic = FAKE_IMAGE, .arch = arch, .source = fake_image_sum(p->source, strlen(p->source))};
    p->image.sum = fake_image_sum(&p->image, offsetof(fake_image, sum));
    p->compiled = true;
    return 0;
}

int nvrtcGetCUBINSize(nvrtc_program *p, size_t *size)
{
    *size = p->compiled ? sizeof p->image : 0;
    return 0;
}

int nvrtcGetCUBIN(nvrtc_program *p, char *out)
{
    if (!p->compiled)
        return INVALID_PROGRAM;
    memcpy(out, &p->image, sizeof p->image);
    return 0;
}

static const char ptx[] = "// fake\n.version 8.0\n.target sm_80\n";

int nvrtcGetPTXSize(nvrtc_program *p, size_t *size)
{
    *size = p->compiled ? sizeof ptx : 0;
    return 0;
}

int nvrtcGetPTX(nvrtc_program *p, char *out)
{
    if (!p->compiled)
        return INVALID_PROGRAM;
    memcpy(out, ptx, sizeof ptx);
    return 0;
}

int nvrtcGetProgramLogSize(nvrtc_program *p, size_t *size)
{
    *size = strlen(p->log) + 1;
    return 0;
}

int nvrtcGetProgramLog(nvrtc_program *p, char *out)
{
    memcpy(out, p->log, strlen(p->log) + 1);
    return 0;
}
