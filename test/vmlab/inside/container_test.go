//go:build vmguest

package inside

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/xcena-dev/maru/client"
	"github.com/xcena-dev/maru/internal/keys"
)

// containerEnv makes the test binary an engine: it opens a client at that server, holds,
// and waits to be killed.
const containerEnv = "MARU_VMLAB_ENGINE"

// The first machine of a pair has the daemons.
const remoteServer = "10.77.0.1:5555"

func init() {
	address := os.Getenv(containerEnv)
	if address == "" {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), 100*time.Second)
	defer cancel()
	_, err := client.Open(ctx, client.Config{
		ServerAddress: address, InstanceID: "container", Namespace: keys.OpaqueNamespace(), Opaque: true,
		PageBytes: 64 << 10, CXLBytes: 16 << 20, RegionBytes: 8 << 20, RPCTimeout: 20 * time.Second, ConnectTimeout: 20 * time.Second,
	})
	if err != nil {
		fmt.Println("error", err)
		os.Exit(1)
	}
	fmt.Println("pid", os.Getpid())
	select {}
}

// TestContainersStart starts two engines, each the first process of a pid namespace, and
// notes their pids as the host sees them. They outlive the test.
func TestContainersStart(t *testing.T) {
	agentIsReady(t)
	for i := 1; i <= 2; i++ {
		cmd := exec.Command("/proc/self/exe")
		cmd.Env = append(os.Environ(), containerEnv+"="+remoteServer)
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID | syscall.CLONE_NEWNS | syscall.CLONE_NEWIPC, Setsid: true}
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		log, err := os.Create(fmt.Sprintf("/tmp/container.%d.log", i))
		if err != nil {
			t.Fatal(err)
		}
		cmd.Stderr = log
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		line, err := bufio.NewReader(out).ReadString('\n')
		if line != "pid 1\n" {
			text, _ := os.ReadFile(log.Name())
			t.Fatalf("engine %d says %q, %v\n%s", i, line, err, text)
		}
		if err := os.WriteFile(fmt.Sprintf("/state/container.%d", i), []byte(strconv.Itoa(cmd.Process.Pid)+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

func agentIsReady(t *testing.T) {
	t.Helper()
	text := ""
	for range 300 {
		req, err := http.NewRequestWithContext(deadline(t), http.MethodGet, "http://127.0.0.1:19860/readyz", nil)
		if err != nil {
			t.Fatal(err)
		}
		r, err := http.DefaultClient.Do(req)
		if err == nil {
			b, _ := io.ReadAll(r.Body)
			_ = r.Body.Close()
			if text = string(b); text == "ok\n" {
				return
			}
		}
		time.Sleep(100 * time.Millisecond)
	}
	t.Fatalf("the agent is not ready: %q", text)
}

// TestContainersListed: what the agent vouches for are the pids of the host.
func TestContainersListed(t *testing.T) {
	req, err := http.NewRequestWithContext(deadline(t), http.MethodGet, "http://127.0.0.1:19860/metrics", nil)
	if err != nil {
		t.Fatal(err)
	}
	r, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = r.Body.Close() }()
	b, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"maru_agent_sessions 2", "maru_agent_processes 2", "maru_agent_processes_lost 0"} {
		if !strings.Contains(string(b), want+"\n") {
			t.Errorf("metrics lack %q", want)
		}
	}
}
