package edgelimit

import (
	"net/http"
	"strings"
	"testing"
	"unsafe"
)

// What a request may allocate. Resolving, keying and deciding allocate nothing;
// the handler as a whole keeps one state for the request, the placeholders' hook
// and, where a header named the client, the text in Caddy's variables. Whoever
// adds an allocation raises a number here, and says in the commit what it buys.
func TestAllocations(t *testing.T) {
	const oneOfEach = "limit bench" + endlessLimit + "ceiling bench_all" + endlessCeiling
	rows := []struct {
		why    string
		lines  string
		direct bool // the client is the peer, and sends no chain
		status int
		most   float64
	}{
		{"a bare handler", benchTrust, false, http.StatusOK, 3},
		{"a limit and a ceiling add nothing", benchTrust + oneOfEach, false, http.StatusOK, 3},
		{"nor do four limits", benchTrust + benchLimits(4), false, http.StatusOK, 3},
		{"sixteen are remembered in a list of their own", benchTrust + benchLimits(16), false, http.StatusOK, 4},
		{"a direct client's text is there already", oneOfEach, true, http.StatusOK, 2},
		{"a denial, with its Retry-After", benchTrust + "limit bench_denied 1/1d", false, http.StatusTooManyRequests, 5},
	}
	for _, row := range rows {
		t.Run(row.why, func(t *testing.T) {
			var run benchRun
			run.prepare(t, benchHandler(t, row.lines), 5)
			if row.direct {
				run.lines = nil
			}
			run.serve()
			if raceDetector {
				row.most++ // which keeps more on the heap now and then
			}
			var status int
			if got := testing.AllocsPerRun(200, func() { status = run.serve() }); got > row.most {
				t.Errorf("%v allocations, at most %v are needed", got, row.most)
			}
			expect(t, status, row.status, "status")
		})
	}
}

// A placeholder in a key costs what Caddy allocates to answer for it.
func TestDecidingAllocatesNothing(t *testing.T) {
	h := benchHandler(t, benchTrust+"limit bench"+endlessLimit+"limit bench_keyed"+"  1000000/s {\nkey client text\nkey_writer caller\n}\nceiling bench_all"+endlessCeiling)
	r := benchRequest(t, "X-Forwarded-For: 6.6.6.6, 203.0.113.7")
	vars := varsOf(r)
	state, _ := h.resolve(r, localAddr(r))
	expect(t, testing.AllocsPerRun(200, func() { h.client.resolve(r, vars) }), 0, "resolving")
	now := clock()
	expect(t, testing.AllocsPerRun(200, func() {
		state.judgements = nil
		var space [4]charge
		if charges, _, err := h.decide(r, state, space[:0], now); len(charges) != 3 || err != nil {
			t.Fatal(len(charges), err)
		}
	}), 0, "keying and deciding")
}

// A line of nothing but commas is 16,000 empty tokens.
func TestConnectionOfCommasAllocatesNothing(t *testing.T) {
	h := benchHandler(t, benchTrust)
	header := http.Header{"Connection": {strings.Repeat(",", 16_000)}}
	expect(t, testing.AllocsPerRun(20, func() { unname(header, header["Connection"], h.forwarder.always) }), 0, "allocations")
	named := "X-Real-IP" + strings.Repeat(",", 16_000)
	expect(t, testing.AllocsPerRun(20, func() { unname(http.Header{}, []string{named}, h.forwarder.always) }) <= 4, true, "two copies of it at most")
}

// Sizes that a request, or a limit, carries along.
func TestSizes(t *testing.T) {
	for _, row := range []struct {
		what      string
		got, most uintptr
	}{
		{"what is known of a request", unsafe.Sizeof(requestState{}), 240},
		{"one budget that a request counts against", unsafe.Sizeof(charge{}), 56},
		{"what denied a request", unsafe.Sizeof(denial{}), 48},
		{"counters under one name", unsafe.Sizeof(counters{}), 32},
	} {
		if row.got > row.most {
			t.Errorf("%s takes %d bytes, at most %d are meant", row.what, row.got, row.most)
		}
	}
}
