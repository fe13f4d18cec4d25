/* Stands in for NVIDIA's driver where there is none, so that cuTile's own launch function runs.

   A launch does nothing. There is one device, an sm_90, with one context. The environment says which
   CUDA version the driver has (STAND_IN_CUDA).
   stand_in_launch() copies what the last one was given: the words of CUlaunchConfig without its
   pointer to the attributes, the words of the first attribute, and the first `count` arguments. */
#include <stdlib.h>
#include <string.h>

static void *context = &context;

int cuDriverGetVersion(int *version) {
    const char *given = getenv("STAND_IN_CUDA");
    *version = given ? atoi(given) : 13000;
    return 0;
}

static int nothing(void) { return 0; }
static int device_count(int *count) { *count = 1; return 0; }
static int device(int *found, int ordinal) { *found = ordinal; return 0; }
static int current_device(int *found) { *found = 0; return 0; }
static int current_context(void **found) { *found = context; return 0; }
static int context_of_stream(void *stream, void **found) { *found = context; return 0; }
static int context_of_pointer(void **found, int attribute, void *p) { *found = context; return 0; }
static int context_id(void *of, unsigned long long *id) { *id = 1; return 0; }
static int error_string(int error, const char **text) { *text = "stand-in"; return 0; }
static int load(void **library) { *library = context; return 0; }
static int kernel(void **found) { *found = context; return 0; }

enum { CONFIG = 7, STREAM = 4, ATTRIBUTES = 5, COUNT = 6, ATTRIBUTE = 2, MOST = 256 };
static unsigned long long last[CONFIG + ATTRIBUTE + MOST];
static int taken;

void stand_in_take(int count) { taken = count; }
const unsigned long long *stand_in_launch(void) { return last; }

int cuLaunchKernelEx(const unsigned long long *config, void *function, void **arguments, void *_) {
    memset(last, 0, sizeof(last));
    memcpy(last, config, CONFIG * sizeof(*last));
    last[3] &= 0xffffffff;  /* behind the bytes of shared memory there is a gap */
    last[COUNT] &= 0xffffffff;
    if (last[COUNT]) {
        const unsigned long long *attribute = (void *)config[ATTRIBUTES];
        last[CONFIG] = attribute[0] & 0xffffffff;
        last[CONFIG + 1] = attribute[1] & 0xffffffff;
    }
    last[ATTRIBUTES] = 0;
    for (int i = 0; i < taken; i++)
        memcpy(&last[CONFIG + ATTRIBUTE + i], arguments[i], sizeof(*last));
    return 0;
}

static int attribute(int *value, int which, int of) {
    enum { MAJOR = 75, MINOR = 76 };
    *value = which == MAJOR ? 9 : which == MINOR ? 0 : 1 << 20;
    return 0;
}

static const struct { const char *name; void *function; } FUNCTIONS[] = {
    {"cuDriverGetVersion", cuDriverGetVersion},
    {"cuDeviceGetCount", device_count},
    {"cuDeviceGet", device},
    {"cuDeviceGetAttribute", attribute},
    {"cuCtxGetDevice", current_device},
    {"cuCtxGetCurrent", current_context},
    {"cuCtxGetId", context_id},
    {"cuStreamGetCtx", context_of_stream},
    {"cuPointerGetAttribute", context_of_pointer},
    {"cuGetErrorString", error_string},
    {"cuLibraryLoadData", load},
    {"cuLibraryGetKernel", kernel},
    {"cuLaunchKernelEx", cuLaunchKernelEx},
};

int cuGetProcAddress_v2(const char *name, void **found, int version, unsigned long long flags,
                        int *status) {
    *found = nothing;
    for (size_t i = 0; i < sizeof(FUNCTIONS) / sizeof(FUNCTIONS[0]); i++)
        if (!strcmp(name, FUNCTIONS[i].name)) *found = FUNCTIONS[i].function;
    if (status) *status = 0;
    return 0;
}
