#include "base/error.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>

#define STRING_(x) #x
#define STRING(x) STRING_(x)

static const struct {
    int code;
    const char *name, *text;
} errors[] = {
#define XX(name, value, text) {DRAY_E##name, "E" #name, text},
    DRAY_ERROR_MAP(XX)
#undef XX
};

const char *dray_error_name(int code)
{
    if (code == DRAY_OK)
        return "OK";
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == code)
            return errors[i].name;
    return "E?";
}

const char *dray_strerror(int code)
{
    if (code == DRAY_OK)
        return "success";
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == code)
            return errors[i].text;
    return "unknown error";
}

const char *dray_version(void)
{
    return STRING(DRAY_VERSION_MAJOR) "." STRING(DRAY_VERSION_MINOR) "." STRING(DRAY_VERSION_PATCH);
}

static void fill(dray_error *error, int code, int origin, int64_t raw, const char *format,
                 va_list args)
{
    char message[DRAY_ERROR_MESSAGE_MAX]; /* an argument may point into *error */
    vsnprintf(message, sizeof message, format, args);
    error->code = code;
    error->origin = origin;
    error->raw = raw;
    memcpy(error->message, message, sizeof message);
}

int dray__fail_library(dray_error *error, int code, int origin, int64_t raw, const char *format,
                       ...)
{
    if (error) {
        va_list args;
        va_start(args, format);
        fill(error, code, origin, raw, format, args);
        va_end(args);
    }
    return code;
}

int dray__fail(dray_error *error, int code, const char *format, ...)
{
    if (error) {
        va_list args;
        va_start(args, format);
        fill(error, code, DRAY_ORIGIN_DRAY, 0, format, args);
        va_end(args);
    }
    return code;
}

/* Names the limits of this process that may have been met. EAGAIN comes from a fork or a new
 * thread; glibc also returns it when there is no memory for a thread's stack. */
static void add_limit(int errnum, char *out, size_t capacity)
{
    static const struct {
        int errnum;
        __rlimit_resource_t limit;
        const char *option;
        rlim_t unit;
    } limits[] = {{EMFILE, RLIMIT_NOFILE, "n", 1},
                  {EFBIG, RLIMIT_FSIZE, "f", 1024},
                  {ENOMEM, RLIMIT_AS, "v", 1024},
                  {EAGAIN, RLIMIT_AS, "v", 1024},
                  {EAGAIN, RLIMIT_NPROC, "u", 1}};
    struct rlimit now;
    for (size_t i = 0; i < sizeof limits / sizeof *limits; i++)
        if (limits[i].errnum == errnum && getrlimit(limits[i].limit, &now) == 0 &&
            now.rlim_cur != RLIM_INFINITY) {
            snprintf(out, capacity, " (ulimit -%s is %llu)", limits[i].option,
                     (unsigned long long)(now.rlim_cur / limits[i].unit));
            size_t used = strlen(out);
            out += used;
            capacity -= used;
        }
    if (errnum == ELOOP)
        snprintf(out, capacity, " (a symbolic link, which is not followed here)");
}

int dray__fail_errno(dray_error *error, int errnum, const char *format, ...)
{
    int code = errnum == ENOMEM ? DRAY_ENOMEM : DRAY_ESYS;
    if (error) {
        va_list args;
        va_start(args, format);
        fill(error, code, DRAY_ORIGIN_ERRNO, errnum, format, args);
        va_end(args);
        size_t used = strlen(error->message);
        char text[64];
        snprintf(error->message + used, sizeof error->message - used, ": %s",
                 strerror_r(errnum, text, sizeof text));
        used = strlen(error->message);
        add_limit(errnum, error->message + used, sizeof error->message - used);
    }
    return code;
}

int dray__nomem(dray_error *error)
{
    return dray__fail(error, DRAY_ENOMEM, "out of memory");
}

int dray__fail_prefix(dray_error *error, int code, const char *format, ...)
{
    if (error) {
        char joined[DRAY_ERROR_MESSAGE_MAX];
        va_list args;
        va_start(args, format);
        int used = vsnprintf(joined, sizeof joined, format, args);
        va_end(args);
        if (used < 0)
            used = 0;
        if ((size_t)used < sizeof joined)
            snprintf(joined + used, sizeof joined - (size_t)used, "%s", error->message);
        error->code = code;
        memcpy(error->message, joined, sizeof joined);
    }
    return code;
}
