package e2e

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// A brute force against a login with a budget of ten wrong attempts: right ones
// never use it up, and however many wrong ones come at once, and whoever of them
// hangs up before the answer, no more than ten reach the upstream.
func TestBruteForce(t *testing.T) {
	needLoopbackNetwork(t)
	t.Parallel()
	var wrong atomic.Int64
	upstream := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Query().Get("password") == "right" {
			_, _ = io.WriteString(w, "welcome")
			return
		}
		wrong.Add(1)
		time.Sleep(50 * time.Millisecond) // hashing a password takes time; some callers do not wait so long
		w.WriteHeader(http.StatusUnauthorized)
	}))
	t.Cleanup(upstream.Close)
	addr := freeAddr(t)
	c := startCaddy(t, "", site(addr, `
		edge_limit {
			client connection
			limit login 10/1d {
				on_status 401
			}
		}
		reverse_proxy `+upstream.Listener.Addr().String()))
	client := clientFrom(t, "127.0.0.5")
	login := func(password string) string { return "http://" + addr + "/login?password=" + password }

	for n := range 50 {
		if a := get(t, client, login("right")); a.status != http.StatusOK {
			t.Fatalf("right login %d got %d", n, a.status)
		}
	}
	var all sync.WaitGroup
	for n := range 200 {
		r := request(t, login(strconv.Itoa(n)))
		if n%4 == 0 {
			ctx, cancel := context.WithTimeout(r.Context(), 20*time.Millisecond)
			defer cancel()
			r = r.WithContext(ctx)
		}
		all.Go(func() {
			response, err := client.RoundTrip(r)
			if err != nil {
				return // it hung up
			}
			_, _ = io.Copy(io.Discard, response.Body)
			response.Body.Close()
			if response.StatusCode != 401 && response.StatusCode != 429 {
				t.Errorf("a wrong login got %d", response.StatusCode)
			}
		})
	}
	all.Wait()
	if n := wrong.Load(); n > 10 || n < 5 {
		t.Errorf("%d wrong logins reached the upstream, the budget is 10", n)
	}
	for range 10 {
		get(t, client, login("again"))
	}
	before := wrong.Load()
	for _, password := range []string{"wrong", "right"} {
		get(t, client, login(password)).wantDenied(t, 24*time.Hour)
	}
	if wrong.Load() != before || before > 10 {
		t.Errorf("%d wrong logins reached the upstream, then %d: none may once the budget is used up", before, wrong.Load())
	}
	if a := get(t, clientFrom(t, "127.0.0.6"), login("right")); a.status != http.StatusOK {
		t.Errorf("another client's right login got %d", a.status)
	}
	_ = c
}
