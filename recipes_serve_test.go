package edgelimit

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	_ "github.com/caddyserver/caddy/v2/modules/standard"
)

// servedRecipe is a Caddy that runs a recipe, and what stands around it.
type servedRecipe struct {
	*testing.T
	address string
	app     *recipeUpstream // app:3000
	auth    *recipeUpstream // auth:3000
	ahead   atomic.Int64    // how far the clock was moved
	client  *http.Client
}

// serve runs the recipe until the test ends.
func (r *recipe) serve(t *testing.T) *servedRecipe {
	t.Helper()
	s := &servedRecipe{T: t, app: startRecipeUpstream(t, r.app), auth: startRecipeUpstream(t, r.auth)}
	s.load(adaptRecipe(t, r.caddyfile, func(key string, value any) any {
		switch key {
		case "listen":
			return []any{"127.0.0.1:0"}
		case "dial":
			if value == "app:3000" {
				return s.app.address
			} else if value == "auth:3000" {
				return s.auth.address
			}
			t.Fatalf("the recipe has an upstream %v, which the test does not", value)
		case "ranges":
			for i, text := range value.([]any) {
				if text == r.fromRange {
					value.([]any)[i] = "127.0.0.1"
				}
			}
		case "client":
			if fmt.Sprint(value) == "map[connection:true]" {
				return map[string]any{"trusted_proxies": []any{map[string]any{"source": "static", "ranges": []any{"127.0.0.1"}}}, "hops": 1}
			}
		}
		return value
	}))
	return s
}

// adaptRecipe adapts a Caddyfile, rewrites each field as replace says, and keeps
// the configuration from touching the machine that the tests run on.
func adaptRecipe(t *testing.T, text string, replace func(key string, value any) any) map[string]any {
	t.Helper()
	adapted, warnings, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(text), nil)
	if err != nil {
		t.Fatalf("adapting: %v", err)
	}
	if len(warnings) > 0 {
		t.Errorf("adapting: %v", warnings)
	}
	var config map[string]any
	if err := json.Unmarshal(adapted, &config); err != nil {
		t.Fatal(err)
	}
	replaceFields(config, replace)
	type object = map[string]any
	config["admin"] = object{"disabled": true, "config": object{"persist": false}}
	config["storage"] = object{"module": "file_system", "root": ownDataHome(t)}
	config["logging"] = object{"logs": object{"default": object{"writer": object{"output": "discard"}}}}
	apps := config["apps"].(object)
	apps["http"].(object)["grace_period"] = "2s"
	return config
}

// ownDataHome gives Caddy a place of its own to keep what it keeps.
func ownDataHome(t *testing.T) string {
	t.Helper()
	directory, err := os.MkdirTemp("", "edge_limit")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(directory) })
	t.Setenv("XDG_DATA_HOME", directory)
	return directory
}

func replaceFields(node any, replace func(key string, value any) any) {
	switch node := node.(type) {
	case map[string]any:
		for key, value := range node {
			node[key] = replace(key, value)
			replaceFields(node[key], replace)
		}
	case []any:
		for _, element := range node {
			replaceFields(element, replace)
		}
	}
}

// load makes Caddy run the configuration until the test ends, on a clock that
// stands still.
func (s *servedRecipe) load(config map[string]any) {
	s.Helper()
	text, err := json.Marshal(config)
	if err != nil {
		s.Fatal(err)
	}
	if err := caddy.Load(text, true); err != nil {
		s.Fatalf("loading: %v", err)
	}
	s.Cleanup(func() {
		if err := caddy.Stop(); err != nil {
			s.Error(err)
		}
	})
	transport := &http.Transport{MaxIdleConnsPerHost: 64, ExpectContinueTimeout: time.Minute}
	s.Cleanup(transport.CloseIdleConnections)
	s.client = &http.Client{Transport: transport, Timeout: time.Minute}

	loaded, err := caddy.ActiveContext().AppIfConfigured("http")
	if err != nil {
		s.Fatal(err)
	}
	start := clock()
	now := func() int64 { return start + s.ahead.Load() }
	for _, server := range loaded.(*caddyhttp.App).Servers {
		s.address = server.Listeners()[0].Addr().String()
		setClock(server.Routes, now)
	}
}

func setClock(routes caddyhttp.RouteList, now func() int64) {
	for _, route := range routes {
		for _, handler := range route.Handlers {
			switch handler := handler.(type) {
			case *Handler:
				handler.now = now
			case *caddyhttp.Subroute:
				setClock(handler.Routes, now)
			}
		}
	}
}

// later moves the clock.
func (s *servedRecipe) later(d time.Duration) { s.ahead.Add(int64(d)) }

// recipeRequest is a request of a client, which the test states as its proxy.
type recipeRequest struct {
	client string // default: one and the same
	method string
	path   string
	header map[string]string
	body   io.Reader
}

// recipeAnswer is what came back.
type recipeAnswer struct {
	status int
	header http.Header
}

func (s *servedRecipe) send(r recipeRequest) recipeAnswer {
	s.Helper()
	a, err := s.trySend(r)
	if err != nil {
		s.Fatal(err)
	}
	return a
}

func (s *servedRecipe) trySend(r recipeRequest) (recipeAnswer, error) {
	request, err := http.NewRequest(r.method, "http://"+s.address+r.path, r.body)
	if err != nil {
		return recipeAnswer{}, err
	}
	if r.client == "" {
		r.client = oneClient
	}
	request.Header.Set(headerForwardedFor, r.client)
	for name, value := range r.header {
		request.Header.Set(name, value)
	}
	response, err := s.client.Do(request)
	if err != nil {
		return recipeAnswer{}, err
	}
	defer response.Body.Close()
	_, err = io.Copy(io.Discard, response.Body)
	return recipeAnswer{response.StatusCode, response.Header}, err
}

const (
	oneClient     = "203.0.113.7"
	anotherClient = "203.0.113.8"
)

// manyClients gives each number an address of its own.
func manyClients(n int) string { return fmt.Sprintf("100.%d.%d.%d", 64+n>>16, n>>8&0xff, n&0xff) }

// statuses sends what request says, n times one after the other, and counts the
// answers by status.
func (s *servedRecipe) statuses(n int, request func(n int) recipeRequest) map[int]int {
	s.Helper()
	count := make(map[int]int)
	for i := range n {
		count[s.send(request(i)).status]++
	}
	return count
}

// always is the same request each time.
func always(r recipeRequest) func(int) recipeRequest { return func(int) recipeRequest { return r } }

// wantStatuses checks the counts of statuses, given as pairs of both.
func (s *servedRecipe) wantStatuses(got map[int]int, pairs ...int) {
	s.Helper()
	want := make(map[int]int)
	for i := 0; i < len(pairs); i += 2 {
		want[pairs[i]] = pairs[i+1]
	}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		s.Errorf("statuses %v, want %v", got, want)
	}
}

func (s *servedRecipe) wantStatus(r recipeRequest, want int) recipeAnswer {
	s.Helper()
	a := s.send(r)
	if a.status != want {
		s.Errorf("%s %s: status %d, want %d", r.method, r.path, a.status, want)
	}
	return a
}

// wantDenied checks a denial and its Retry-After; "": it has none.
func (s *servedRecipe) wantDenied(r recipeRequest, status int, retryAfter string) {
	s.Helper()
	if got := s.wantStatus(r, status).header.Get("Retry-After"); got != retryAfter {
		s.Errorf("%s %s: Retry-After %q, want %q", r.method, r.path, got, retryAfter)
	}
}

// recipeUpstream is a server behind Caddy. It reads what it gets and answers 200,
// unless it is told to answer otherwise.
type recipeUpstream struct {
	address string
	answer  http.HandlerFunc

	mu      sync.Mutex
	headers []http.Header // of the requests that came
	whole   int           // of these, requests with the whole body
}

func startRecipeUpstream(t *testing.T, answer http.HandlerFunc) *recipeUpstream {
	u := &recipeUpstream{answer: answer}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		u.mu.Lock()
		u.headers = append(u.headers, r.Header)
		u.mu.Unlock()
		if _, err := io.Copy(io.Discard, r.Body); err == nil {
			u.mu.Lock()
			u.whole++
			u.mu.Unlock()
		}
		if u.answer != nil {
			u.answer(w, r)
		}
	}))
	t.Cleanup(server.Close)
	u.address = server.Listener.Addr().String()
	return u
}

// seen is how many requests came.
func (u *recipeUpstream) seen() int {
	u.mu.Lock()
	defer u.mu.Unlock()
	return len(u.headers)
}

// seenWhole is how many came with their whole body.
func (u *recipeUpstream) seenWhole() int {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.whole
}

func (u *recipeUpstream) last() http.Header {
	u.mu.Lock()
	defer u.mu.Unlock()
	if len(u.headers) == 0 {
		return nil
	}
	return u.headers[len(u.headers)-1]
}

func (s *servedRecipe) wantSeen(u *recipeUpstream, want int) {
	s.Helper()
	if got := u.seen(); got != want {
		s.Errorf("%d requests reached the upstream, want %d", got, want)
	}
}

// waitUntil waits for what other goroutines bring about.
func (s *servedRecipe) waitUntil(what string, done func() bool) {
	s.Helper()
	for deadline := time.Now().Add(time.Minute); !done(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			s.Fatalf("waited in vain for %s", what)
		}
	}
}

// holdAnswers makes the upstream answer only when the returned function is
// called.
func (s *servedRecipe) holdAnswers() (release func()) {
	held := make(chan struct{})
	release = sync.OnceFunc(func() { close(held) })
	s.Cleanup(release)
	s.app.answer = func(http.ResponseWriter, *http.Request) { <-held }
	return release
}

// atTheSameTime sends the request n times at once and counts the answers when all
// have come.
func (s *servedRecipe) atTheSameTime(n int, request recipeRequest) (wait func() map[int]int) {
	answers := make(chan int, n)
	for range n {
		go func() {
			a, err := s.trySend(request)
			if err != nil {
				s.Error(err)
			}
			answers <- a.status
		}()
	}
	return func() map[int]int {
		count := make(map[int]int)
		for range n {
			count[<-answers]++
		}
		return count
	}
}
