package edgelimit

import (
	"encoding/json"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"
)

// TestExample runs example.Caddyfile, on other ports, and checks what its
// comments and the README say that it shows.
func TestExample(t *testing.T) {
	text, err := os.ReadFile("example.Caddyfile")
	if err != nil {
		t.Fatal(err)
	}
	addresses := freeAddresses(t, "127.0.0.1:8080", "127.0.0.1:8081", "127.0.0.1:9000")
	config := adaptRecipe(t, string(text), func(key string, value any) any {
		switch key {
		case "listen":
			listen := value.([]any)
			if len(listen) != 1 || addresses[listen[0]] == "" {
				t.Fatalf("a site listens at %v: it must be on the loopback network, and on a port that needs no root", listen)
			}
			return []any{addresses[listen[0]]}
		case "dial":
			return addresses[value]
		}
		return value
	})
	loaded, err := json.Marshal(config)
	if err != nil {
		t.Fatal(err)
	}
	if err := caddy.Load(loaded, true); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := caddy.Stop(); err != nil {
			t.Error(err)
		}
	})
	get := func(port, path string, headers ...string) (status int, retryAfter, body string) {
		t.Helper()
		request, err := http.NewRequest(http.MethodGet, "http://"+addresses["127.0.0.1:"+port]+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		for _, header := range headers {
			name, value, _ := strings.Cut(header, ": ")
			request.Header.Set(name, value)
		}
		request.Close = true
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		defer response.Body.Close()
		got, err := io.ReadAll(response.Body)
		if err != nil {
			t.Fatal(err)
		}
		return response.StatusCode, response.Header.Get("Retry-After"), string(got)
	}
	told := func(forwardedFor string) string {
		return strings.TrimSuffix("X-Forwarded-For: "+forwardedFor, " ") + "\nX-Real-IP:\nForwarded:\n"
	}
	wantTold := func(port, forwardedFor string, headers ...string) {
		t.Helper()
		status, _, body := get(port, "/", headers...)
		if body = strings.ReplaceAll(body, ": \n", ":\n"); status != http.StatusOK || body != told(forwardedFor) {
			t.Errorf("status %d, the app says\n%swant\n%s", status, body, told(forwardedFor))
		}
	}

	// one value, whatever is forged
	wantTold("8080", "198.51.100.22", "X-Forwarded-For: 198.51.100.22")
	wantTold("8080", "198.51.100.22", "X-Forwarded-For: 1.2.3.4, 198.51.100.22", "X-Real-IP: 1.2.3.4", "Forwarded: for=1.2.3.4")
	wantTold("8080", "")
	wantTold("8081", "198.51.100.22", "X-Forwarded-For: 198.51.100.22")
	wantTold("8081", "", "X-Forwarded-For: 1.2.3.4, 198.51.100.22")

	// 200s, then 429, and nobody else is affected
	for n, want := range []int{200, 200, 200, 200, 200, 429, 429} {
		forged := "X-Forwarded-For: 10.9.8." + string(rune('1'+n)) + ", 203.0.113.7"
		status, retryAfter, _ := get("8080", "/", forged)
		if status != want || (status == 429) != (retryAfter != "") {
			t.Errorf("request %d: status %d, Retry-After %q, want %d", n+1, status, retryAfter, want)
		}
	}
	wantTold("8080", "203.0.113.8", "X-Forwarded-For: 203.0.113.8")

	// the probe
	for _, probe := range []struct{ port, header, want string }{
		{"8080", "X-Forwarded-For: 1.2.3.4, 203.0.113.9", `"resolved":"203.0.113.9","source":"hops","reason":""`},
		{"8080", "X-Other: none", `"resolved":null,"source":"unresolved","reason":"missing_header"`},
		{"8081", "X-Forwarded-For: 203.0.113.9", `"resolved":"203.0.113.9","source":"single_value","reason":""`},
		{"8081", "X-Forwarded-For: 1.2.3.4, 203.0.113.9", `"resolved":null,"source":"unresolved","reason":"not_single"`},
	} {
		if _, _, body := get(probe.port, "/client-ip", probe.header); !strings.Contains(body, probe.want) {
			t.Errorf("port %s, %s: the probe says %s, want %s", probe.port, probe.header, body, probe.want)
		}
	}

	// the ceiling holds for both sites together, however many clients there are
	passed := 0
	for n := range 700 {
		status, _, _ := get([]string{"8080", "8081"}[n%2], "/", "X-Forwarded-For: "+manyClients(n))
		if status == http.StatusOK {
			passed++
		} else if status != http.StatusServiceUnavailable {
			t.Errorf("client %d: status %d, want 200 or 503", n, status)
		}
	}
	if passed < 500 || passed > 600 {
		t.Errorf("%d requests passed the ceiling of 600, of which some were used before", passed)
	}
}

// freeAddresses finds an address that is free for each of those given.
func freeAddresses(t *testing.T, of ...string) map[any]string {
	t.Helper()
	addresses := make(map[any]string)
	for _, address := range of {
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer listener.Close() // after all are found, so that they differ
		addresses[address] = listener.Addr().String()
	}
	return addresses
}
