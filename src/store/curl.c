#include "store/curl.h"

#include "base/error.h"
#include "base/library.h"

#include <dray/checkpoint.h>

#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#if __has_include(<curl/curl.h>)
#define CURL_DISABLE_DEPRECATION
#include <curl/curl.h>
#define SAME(name) _Static_assert((int)name == (int)DRAY__##name, #name)
SAME(CURLOPT_WRITEDATA);
SAME(CURLOPT_URL);
SAME(CURLOPT_RANGE);
SAME(CURLOPT_READDATA);
SAME(CURLOPT_ERRORBUFFER);
SAME(CURLOPT_POSTFIELDS);
SAME(CURLOPT_HTTPHEADER);
SAME(CURLOPT_HEADERDATA);
SAME(CURLOPT_CUSTOMREQUEST);
SAME(CURLOPT_XFERINFODATA);
SAME(CURLOPT_SEEKDATA);
SAME(CURLOPT_USERNAME);
SAME(CURLOPT_PASSWORD);
SAME(CURLOPT_AWS_SIGV4);
SAME(CURLOPT_WRITEFUNCTION);
SAME(CURLOPT_READFUNCTION);
SAME(CURLOPT_HEADERFUNCTION);
SAME(CURLOPT_SEEKFUNCTION);
SAME(CURLOPT_XFERINFOFUNCTION);
SAME(CURLOPT_INFILESIZE_LARGE);
SAME(CURLOPT_POSTFIELDSIZE_LARGE);
SAME(CURLOPT_LOW_SPEED_LIMIT);
SAME(CURLOPT_LOW_SPEED_TIME);
SAME(CURLOPT_NOPROGRESS);
SAME(CURLOPT_NOBODY);
SAME(CURLOPT_UPLOAD);
SAME(CURLOPT_POST);
SAME(CURLOPT_NOSIGNAL);
SAME(CURLOPT_CONNECTTIMEOUT_MS);
SAME(CURLOPT_PROTOCOLS);
SAME(CURLOPT_PATH_AS_IS);
SAME(CURLINFO_RESPONSE_CODE);
SAME(CURL_GLOBAL_ALL);
SAME(CURLE_OK);
SAME(CURLE_WRITE_ERROR);
SAME(CURLE_OUT_OF_MEMORY);
SAME(CURLE_ABORTED_BY_CALLBACK);
SAME(CURL_ERROR_SIZE);
_Static_assert((CURLPROTO_HTTP | CURLPROTO_HTTPS) == DRAY__CURLPROTO_HTTP_AND_HTTPS, "protocols");
#endif

static dray__curl library;
static bool opened;
static char trouble[256];
static pthread_once_t once = PTHREAD_ONCE_INIT;

static const dray__symbol functions[] = {
#define XX(name, result, arguments) {"curl_" #name, offsetof(dray__curl, name), false},
    DRAY__CURL_FUNCTIONS(XX)
#undef XX
};

/* Opens libcurl; the build with OpenSSL first, because this library links OpenSSL, too. */
static void open_library(void)
{
    static const char *const names[] = {"libcurl.so.4", "libcurl-gnutls.so.4"};
    void *curl = NULL;
    for (size_t i = 0; i < sizeof names / sizeof *names && !curl; i++)
        curl = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
    if (!curl) {
        snprintf(trouble, sizeof trouble, "install it (Debian: apt install libcurl4): %s",
                 dlerror());
        return;
    }
    const char *missing =
        dray__symbols_load(curl, functions, sizeof functions / sizeof *functions, &library);
    if (missing) {
        snprintf(trouble, sizeof trouble, "it has no %s", missing);
        return;
    }
    /* libcurl signs requests from 7.75 on, and includes a request's own sum of its body from 7.87
     * on. */
    unsigned major = 0, minor = 0;
    const char *version = library.version();
    if (sscanf(version, "libcurl/%u.%u", &major, &minor) != 2 ||
        major * 1000 + minor < 7 * 1000 + 87)
        snprintf(trouble, sizeof trouble, "it is %.40s: 7.87 or newer is needed", version);
    else
        opened = library.global_init(DRAY__CURL_GLOBAL_ALL) == 0;
    if (!opened && !trouble[0])
        snprintf(trouble, sizeof trouble, "curl_global_init failed");
}

int dray_store_find(const char *store, char *detail, size_t size, dray_error *error)
{
    const dray__curl *curl;
    if (!store || strcmp(store, "s3") != 0)
        return dray__fail(error, DRAY_EINVALID, "store '%.60s': expected s3", store ? store : "");
    int rc = dray__curl_get(&curl, error);
    if (!rc && detail && size)
        snprintf(detail, size, "%s", curl->version());
    if (!rc && detail &&
        size) { /* its own version and that of its TLS; all else is more than asked */
        char *space = strchr(detail, ' ');
        space = space ? strchr(space + 1, ' ') : NULL;
        if (space)
            *space = 0;
    }
    return rc;
}

int dray__curl_get(const dray__curl **out, dray_error *error)
{
    pthread_once(&once, open_library);
    if (!opened)
        return dray__fail(error, DRAY_EUNSUPPORTED, "libcurl is not usable here; %s", trouble);
    *out = &library;
    return DRAY_OK;
}
